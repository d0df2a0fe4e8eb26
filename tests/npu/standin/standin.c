/* A pretend Ascend device: memory of the host, queues that are always done, operators that compute
   nothing. Counts what is allocated, copied, waited for and launched; keeps the names of launches.

   Read by the tests through standin_counts, standin_trace and standin_trace_clear.
   STANDIN_SOC: the chip's name (Ascend310P3); STANDIN_DEVICES: how many (1). Device memory is zero
   when it is allocated, so values that nobody computed read as zeros and not as NaN. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  MALLOC_CALLS, MALLOC_BYTES, HOST_MALLOC_CALLS, H2D_CALLS, H2D_BYTES, D2H_CALLS, D2H_BYTES,
  STREAM_SYNCS, EVENT_SYNCS, DEVICE_SYNCS, LAUNCHES, REPLAYS, CAPTURES, COLLECTIVES,
  REFUSED_TENSORS, NUM_COUNTS
};
static uint64_t counts[NUM_COUNTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *trace;
static size_t trace_used, trace_size;

static void count(int what, uint64_t amount) { __atomic_add_fetch(&counts[what], amount, 5); }

void standin_counts(uint64_t *out) { memcpy(out, counts, sizeof counts); }
int standin_num_counts(void) { return NUM_COUNTS; }

static void note(const char *text) {
  pthread_mutex_lock(&lock);
  size_t length = strlen(text);
  if (trace_used + length + 2 > trace_size) {
    trace_size = 2 * (trace_size + length + 64);
    trace = realloc(trace, trace_size);
  }
  memcpy(trace + trace_used, text, length);
  trace_used += length;
  trace[trace_used++] = '\n';
  trace[trace_used] = 0;
  pthread_mutex_unlock(&lock);
}

void standin_launch(const char *name) { count(LAUNCHES, 1); note(name); }
const char *standin_trace(void) { return trace_used ? trace : ""; }
void standin_trace_clear(void) { pthread_mutex_lock(&lock); trace_used = 0; pthread_mutex_unlock(&lock); }

/* Types that an Ascend 310P has no arithmetic for: bf16, fp8 (e8m0, e5m2, e4m3), fp64. */
static int is_refused(int type) { return type == 27 || type == 11 || (type >= 34 && type <= 38); }

static void *handle(void) { return calloc(1, 64); }

void *aclCreateTensor(const int64_t *dims, uint64_t n, int type, const int64_t *strides,
                      int64_t offset, int format, const int64_t *storage, uint64_t m, void *data) {
  if (is_refused(type)) { count(REFUSED_TENSORS, 1); note("refused dtype in aclCreateTensor"); }
  return handle();
}
void *aclCreateTensorDesc(int type, int n, const int64_t *dims, int format) {
  if (is_refused(type)) { count(REFUSED_TENSORS, 1); note("refused dtype in aclCreateTensorDesc"); }
  return handle();
}
void *aclCreateDataBuffer(void *data, size_t size) { return handle(); }
void *aclopCreateAttr(void) { return handle(); }
int aclopCompileAndExecute(const char *name) { standin_launch(name); return 0; }
int aclopCompileAndExecuteV2(const char *name) { standin_launch(name); return 0; }
int aclopExecuteV2(const char *name) { standin_launch(name); return 0; }

/* The device. */
static __thread int device = -1;
const char *aclrtGetSocName(void) { const char *s = getenv("STANDIN_SOC"); return s ? s : "Ascend310P3"; }
int aclInit(const char *config) { return 0; }
int aclFinalize(void) { return 0; }
int aclrtGetDeviceCount(uint32_t *n) { const char *s = getenv("STANDIN_DEVICES"); *n = s ? atoi(s) : 1; return 0; }
int aclrtSetDevice(int d) { device = d; return 0; }
int aclrtGetDevice(int *d) { if (device < 0) return 107002; *d = device; return 0; }
int aclrtResetDevice(int d) { return 0; }
int aclrtGetCurrentContext(void **c) { *c = (void *)1; return 0; }
int aclrtSetCurrentContext(void *c) { return 0; }
int aclrtCreateContext(void **c, int d) { *c = (void *)1; return 0; }
int aclrtGetDeviceInfo(uint32_t d, int what, int64_t *v) { *v = 8; return 0; }
int aclrtGetDeviceResLimit(int d, int what, uint32_t *v) { *v = 8; return 0; }
int aclrtGetStreamResLimit(void *s, int what, uint32_t *v) { *v = 8; return 0; }
int aclrtGetResInCurrentThread(int what, uint32_t *v) { *v = 8; return 0; }
int aclrtGetRunMode(int *m) { *m = 1; return 0; }
int aclrtDeviceGetBareTgid(int32_t *p) { *p = 1; return 0; }
int aclrtProcessReport(int t) { return 0; }
int aclGetDeviceCapability(uint32_t d, int what, int64_t *v) { *v = 0; return 0; }
size_t aclGetCompileoptSize(int what) { return 256; }
int aclGetCompileopt(int what, char *v, size_t n) { strncpy(v, "disable", n); return 0; }
int aclSetCompileopt(int what, const char *v) { return 0; }
const char *aclGetRecentErrMsg(void) { return "stand-in"; }
void aclAppLog(int level, const char *f, const char *file, uint32_t line, const char *format, ...) {}
int aclrtPeekAtLastError(int level) { return 0; }
int aclrtGetLastError(int level) { return 0; }
int aclsysGetCANNVersion(int what, char *v) { memset(v, 0, 256); strcpy(v, "9.1.0"); return 0; }
int aclsysGetVersionStr(char *name, char *v) { strcpy(v, "9.1.0"); return 0; }

/* Memory. */
int aclrtMalloc(void **p, size_t n, int policy) {
  if (posix_memalign(p, 512, n ? n : 512)) return 207001;
  memset(*p, 0, n ? n : 512);
  count(MALLOC_CALLS, 1);
  count(MALLOC_BYTES, n);
  return 0;
}
int aclrtMallocAlign32(void **p, size_t n, int policy) { return aclrtMalloc(p, n, policy); }
int aclrtFree(void *p) { free(p); return 0; }
int aclrtMallocHost(void **p, size_t n) { count(HOST_MALLOC_CALLS, 1); return posix_memalign(p, 64, n) ? 1 : 0; }
int aclrtFreeHost(void *p) { free(p); return 0; }
static int copied(void *to, const void *from, size_t n, int kind) {
  memcpy(to, from, n);
  if (kind == 1) { count(H2D_CALLS, 1); count(H2D_BYTES, n); }
  if (kind == 2) { count(D2H_CALLS, 1); count(D2H_BYTES, n); note("copy device to host"); }
  return 0;
}
int aclrtMemcpy(void *to, size_t room, const void *from, size_t n, int kind) { return copied(to, from, n, kind); }
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t n, int kind, void *s) { return copied(to, from, n, kind); }
int aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t n, int kind, void *s) { return copied(to, from, n, kind); }
int aclrtMemset(void *p, size_t room, int v, size_t n) { memset(p, v, n); return 0; }
int aclrtMemsetAsync(void *p, size_t room, int v, size_t n, void *s) { memset(p, v, n); return 0; }
int aclrtGetMemInfo(int what, size_t *left, size_t *all) { *all = (size_t)43 << 30; *left = *all; return 0; }

/* Streams and events. */
int aclrtCreateStream(void **s) { *s = handle(); return 0; }
int aclrtCreateStreamWithConfig(void **s, uint32_t priority, uint32_t flag) { *s = handle(); return 0; }
int aclrtDestroyStream(void *s) { return 0; }
int aclrtCtxGetCurrentDefaultStream(void **s) { *s = handle(); return 0; }
int aclrtGetStreamAvailableNum(uint32_t *n) { *n = 1024; return 0; }
int aclrtGetStreamId(void *s, int32_t *i) { *i = 1; return 0; }
int aclrtStreamGetId(void *s, int32_t *i) { *i = 1; return 0; }
int aclrtStreamWaitEvent(void *s, void *e) { return 0; }
int aclrtSynchronizeStream(void *s) { count(STREAM_SYNCS, 1); note("wait for stream"); return 0; }
int aclrtSynchronizeStreamWithTimeout(void *s, int t) { return aclrtSynchronizeStream(s); }
int aclrtSynchronizeDevice(void) { count(DEVICE_SYNCS, 1); note("wait for device"); return 0; }
int aclrtSynchronizeDeviceWithTimeout(int t) { return aclrtSynchronizeDevice(); }
int aclrtCreateEventExWithFlag(void **e, uint32_t flag) { *e = handle(); return 0; }
int aclrtCreateEventWithFlag(void **e, uint32_t flag) { *e = handle(); return 0; }
int aclrtDestroyEvent(void *e) { return 0; }
int aclrtResetEvent(void *e, void *s) { return 0; }
int aclrtRecordEvent(void *e, void *s) { return 0; }
int aclrtSynchronizeEvent(void *e) { count(EVENT_SYNCS, 1); return 0; }
int aclrtSynchronizeEventWithTimeout(void *e, int t) { return aclrtSynchronizeEvent(e); }
int aclrtEventElapsedTime(float *ms, void *a, void *b) { *ms = 0.f; return 0; }
int aclrtQueryEventStatus(void *e, int *s) { *s = 1; return 0; }
int aclrtQueryEvent(void *e, int *s) { *s = 0; return 0; }
int aclrtQueryEventWaitStatus(void *e, int *s) { *s = 1; return 0; }

/* Graphs: what is launched while a stream is captured is the graph's; a replay is one launch. */
static int is_captured;
int aclmdlRICaptureBegin(void *s, int mode) { is_captured = 1; count(CAPTURES, 1); note("capture"); return 0; }
int aclmdlRICaptureGetInfo(void *s, int *state, void **model) { *state = is_captured; *model = (void *)0x99; return 0; }
int aclmdlRICaptureEnd(void *s, void **model) { is_captured = 0; *model = (void *)0x99; note("capture ends"); return 0; }
int aclmdlRIExecuteAsync(void *model, void *s) { count(REPLAYS, 1); note("replay"); return 0; }

/* Collectives leave the data as it is. The log has each one's type as HCCL numbers it:
   0 int8, 1 int16, 2 int32, 3 fp16, 4 fp32, 5 int64, 6 uint64, 11 bf16. */
static int collective(const char *name, uint64_t n, int type) {
  char line[96];
  snprintf(line, sizeof line, "%s type %d", name, type);
  count(COLLECTIVES, 1);
  note(line);
  return 0;
}
int HcclCommInitRootInfo(uint32_t n, void *root, uint32_t rank, void **comm) { *comm = handle(); return 0; }
int HcclCommInitRootInfoConfig(uint32_t n, void *root, uint32_t rank, void *config, void **comm) { *comm = handle(); return 0; }
int HcclAllGather(void *from, void *to, uint64_t n, int type, void *comm, void *s) { return collective("HcclAllGather", n, type); }
int HcclAllReduce(void *from, void *to, uint64_t n, int type, int op, void *comm, void *s) { return collective("HcclAllReduce", n, type); }
int HcclReduceScatter(void *from, void *to, uint64_t n, int type, int op, void *comm, void *s) { return collective("HcclReduceScatter", n, type); }
int HcclBroadcast(void *data, uint64_t n, int type, uint32_t root, void *comm, void *s) { return collective("HcclBroadcast", n, type); }
