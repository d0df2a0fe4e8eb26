/* A libdcmi.so of two cards with two 310P chips each, with the real one's contract: dcmi_init
 * comes first, pointers are not NULL, only cards 2 and 5 and chips 0 and 1 exist, a structure is
 * filled to its last byte. The file $FAKE_DCMI has its mood: hang, crash, lost, away, none.
 * Each refusal as unsupported is noted in $FAKE_DCMI.unsupported.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OK 0
#define INVALID (-8001)
#define TIMED_OUT (-8006)
#define NOT_READY (-8005)
#define UNSUPPORTED (-8255)

struct chip_info { unsigned char type[32], name[32], version[32]; unsigned int cores; };
struct pcie_info {
    unsigned int vendor, subvendor, device, subdevice;
    int domain;
    unsigned int bus, slot, function;
    unsigned char reserve[32];
};
struct memory_info {
    unsigned long long size, available;
    unsigned int freq;
    unsigned long hugepage_kib, hugepages, hugepages_free;
    unsigned int percent;
    unsigned char reserve[60];
};
struct hbm_info { unsigned long long size; unsigned int freq; unsigned long long used;
                  int temp; unsigned int bandwidth; };
struct ecc_info { int enabled; unsigned int single, dual, total_single, total_dual, pages[2]; };
struct process_info { int pid; unsigned long bytes; };
union sensor_info { signed char temp[2]; int ntc[4]; unsigned int data[16]; };

int fake_sizes[] = { sizeof(struct chip_info), sizeof(struct pcie_info), sizeof(struct memory_info),
                     sizeof(struct hbm_info), sizeof(struct ecc_info), sizeof(struct process_info),
                     sizeof(union sensor_info) };

static int ready;

static int mood(const char *word) {
    char text[32] = "";
    FILE *file = fopen(getenv("FAKE_DCMI"), "r");
    if (file) {
        if (!fgets(text, sizeof text, file)) text[0] = 0;
        fclose(file);
    }
    return strncmp(text, word, strlen(word)) == 0;
}

static int refused(const char *call) {
    char path[4096];
    snprintf(path, sizeof path, "%s.unsupported", getenv("FAKE_DCMI"));
    FILE *file = fopen(path, "a");
    if (file) {
        fprintf(file, "%s\n", call);
        fclose(file);
    }
    return UNSUPPORTED;
}

static int chip_error(int card, int chip, const void *out) {
    if (!ready) return NOT_READY;
    if ((card != 2 && card != 5) || chip < 0 || chip > 1 || !out) return INVALID;
    if (mood("lost") || (mood("away") && card == 5)) return TIMED_OUT;
    return OK;
}
#define CHECK(card, chip, out) \
    do { int error = chip_error(card, chip, out); if (error) return error; } while (0)

int dcmi_init(void) {
    printf("the library talks too much\n");
    fflush(stdout);
    if (mood("none")) return NOT_READY;
    ready = 1;
    return OK;
}

#ifdef OLD
int dcmi_get_card_num_list(int *count, int *list, int length) {
#else
int dcmi_get_card_list(int *count, int *list, int length) {
#endif
    if (!ready) return NOT_READY;
    if (!count || !list || length < 2) return INVALID;
    *count = 2; list[0] = 2; list[1] = 5;
    return OK;
}

#ifdef OLD
int dcmi_get_device_num_in_card(int card, int *count) {
    CHECK(card, 0, count);
    *count = 2;
    return OK;
}
#else
int dcmi_get_device_id_in_card(int card, int *max, int *mcu, int *cpu) {
    if (!max || !mcu || !cpu) return INVALID;
    if (!ready || (card != 2 && card != 5)) return INVALID;
    *max = 2; *mcu = 2; *cpu = -1;
    return OK;
}

int dcmi_get_device_ecc_info(int card, int chip, int kind, struct ecc_info *out) {
    CHECK(card, chip, out);
    if (kind != 0) return refused("ecc");
    *out = (struct ecc_info){ 1, 4, 0, 40, 1, { 2, 3 } };
    return OK;
}

int dcmi_get_device_sensor_info(int card, int chip, int sensor, union sensor_info *out) {
    CHECK(card, chip, out);
    if (sensor != 9) return INVALID;
    memset(out, 0x55, sizeof *out);
    out->temp[0] = 95; out->temp[1] = 105;
    return OK;
}
#endif

int dcmi_get_device_logic_id(int *index, int card, int chip) {
    CHECK(card, chip, index);
    *index = (card == 5) * 2 + chip;
    return OK;
}

int dcmi_get_device_chip_info(int card, int chip, struct chip_info *out) {
    CHECK(card, chip, out);
    memset(out, 0, sizeof *out);
    strcpy((char *)out->name, "310P3");
    out->cores = 8;
    return OK;
}

int dcmi_get_device_pcie_info_v2(int card, int chip, struct pcie_info *out) {
    CHECK(card, chip, out);
    memset(out, 0, sizeof *out);
    out->vendor = 0x19e5; out->device = 0xd500; out->bus = card == 2 ? 0x03 : 0x83;
    return OK;
}

int dcmi_get_device_temperature(int card, int chip, int *out) {
    CHECK(card, chip, out);
    if (mood("hang")) for (;;) sleep(1000);
    if (mood("crash")) raise(SIGSEGV);
    *out = card == 5 && chip == 1 ? 32767 : 70 + chip;
    return OK;
}

int dcmi_get_device_memory_info_v3(int card, int chip, struct memory_info *out) {
    CHECK(card, chip, out);
    memset(out, 0x55, sizeof *out);
    out->size = chip ? 43693 : 44278; out->available = 40000;
    return OK;
}

int dcmi_get_device_hbm_info(int card, int chip, struct hbm_info *out) {
    CHECK(card, chip, out);
    return refused("hbm");
}

int dcmi_get_device_utilization_rate(int card, int chip, int kind, unsigned int *out) {
    CHECK(card, chip, out);
    if (kind != 2 && kind != 5) return refused("utilisation");
    *out = kind == 2 ? 81 : 64;
    return OK;
}

int dcmi_get_device_health(int card, int chip, unsigned int *out) {
    CHECK(card, chip, out);
    *out = card == 5 ? 0xffffffffu : (unsigned int)chip;
    return OK;
}

int dcmi_get_device_errorcode_v2(int card, int chip, int *count, unsigned int *codes,
                                 unsigned int length) {
    CHECK(card, chip, count);
    if (!codes || length != 128) return INVALID;
    *count = chip; codes[0] = 0x80e01801u;
    return OK;
}

int dcmi_get_device_resource_info(int card, int chip, struct process_info *list, int *count) {
    CHECK(card, chip, list);
    if (!count) return INVALID;
    memset(list, 0, 64 * sizeof *list);
    *count = 1; list[0] = (struct process_info){ 4815, 38912ul << 20 };
    return OK;
}

int dcmi_mcu_get_power_info(int card, int *out) {
    CHECK(card, 0, out);
    *out = 1184;
    return OK;
}
