"""Every other recorded answer of npu-smi: queries about one thing, lists, and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from rank_worker.device_sensors import smi_parser
from rank_worker.device_sensors.smi_parser import ChipIdentity
from rank_worker.device_sensors.smi_text import (
    Block,
    chip_blocks,
    decimal,
    parse_blocks,
    parse_columns,
    single_block,
)
from tests.rank_worker.sensors.conftest import RECORDED
from tests.rank_worker.sensors.test_smi_table import LAYOUTS

MIB = 1 << 20

USAGES = {
    "ddr capacity(mb)": 44278,
    "ddr usage rate(%)": 91,
    "ddr hugepages total(page)": 19456,
    "ddr hugepages usage rate(%)": 100,
    "aicore usage rate(%)": 83,
    "aicpu usage rate(%)": 4,
    "ctrlcpu usage rate(%)": 11,
    "vectorcore usage rate(%)": 22,
    "ddr bandwidth usage rate(%)": 64,
    "dvpp vdec usage rate(%)": 0,
}
# Of one card: numbers by chip, whether the chip's own number comes first or last.
CARD_ANSWERS: Mapping[str, Mapping[int, Mapping[str, float]]] = {
    "common_300iduo": {
        0: {"memory usage rate(%)": 91, "temperature(c)": 77, "aicore curfreq(mhz)": 1080},
        1: {"memory usage rate(%)": 92, "temperature(c)": 75, "aicore curfreq(mhz)": 960},
    },
    "usages_300iduo_card": {
        0: USAGES,
        1: {"ddr capacity(mb)": 43691, "ddr bandwidth usage rate(%)": 63, "aicpu usage rate(%)": 3},
    },
    "memory_300iduo_card": {
        0: {"total ddr capacity(mb)": 49152, "ddr capacity(mb)": 44278},
        1: {"total ddr capacity(mb)": 49152, "ddr capacity(mb)": 43691},
    },
    "temp_300iduo_card": {0: {"temperature(c)": 77}, 1: {"temperature(c)": 75}},
}
# Of one chip or card, without the number of a chip.
SINGLE_ANSWERS: Mapping[str, Mapping[str, object]] = {
    "usages_300iduo_one_chip": USAGES,
    "temp_300iduo_one_chip": {"temperature(c)": 77},
    "pcie_err_300iduo_one_chip": {"tx error count": 0, "retry count": 0},
    "phyid_remap": {"chip physical id": 2, "chip logic id": 2, "npu id": 5, "chip id": 0},
    "ecc_300iduo_one_chip": {
        "ddr single bit error count": 0,
        "ddr single bit aggregate total err cnt": 3,
        "ddr double bit next-isolated pages count": 0,
    },
    "board_300iduo_card": {"npu id": 2, "chip count": 2, "chip fault": 0},
    "board_300iduo_one_chip": {"npu id": 2, "chip id": 0, "chip position id": 0},
    "power_300iduo_card": {"npu id": 2, "power dissipation(w)": 118.4},
}
WORDS: Mapping[str, Mapping[str, str]] = {
    "board_300iduo_card": {
        "software version": "25.5.1",
        "firmware version": "7.8.0.6.201",
        "compatibility": "OK",
        "pcie bus info": "0000:03:00.0",
        "pci device id": "0xD500",
    },
    "board_300iduo_one_chip": {
        "chip name": "310P3",
        "die id": "1A2B3C4D 00A1A210 5E6F7081 14CC040A 56102003",
        "firmware version": "7.8.0.6.201",
    },
}
# Error lines: the words of its remedy.
ERRORS = {
    "error_device_used_8020": "container",
    "error_driver_not_loaded_8005": "reload the driver",
    "error_board_type_9005": "reset the card",
    "error_no_card": "lspci",
    "error_bad_parameter": "update it",
    "error_query_failed": "dmesg",
}
# Read by name in the tests below.
NAMED = {
    "map_m_300iduo",
    "map_m_unusable_card",
    "list_l_300iduo",
    "power_300iduo_chip_not_supported",
    "health_300iduo_card",
    "health_300iduo_one_chip_ok",
    "health_300iduo_one_chip_fault",
    "ecc_enable_300iduo_on",
    "ecc_enable_300iduo_off",
    "product_300iduo_card",
    "proc_mem_one_chip",
    "watch_300iduo",
}
Recorded = Callable[[str], str]


def test_every_recorded_answer_is_expected_somewhere() -> None:
    expected = {*LAYOUTS, *CARD_ANSWERS, *SINGLE_ANSWERS, *ERRORS, *NAMED}
    assert {path.stem for path in RECORDED.iterdir()} == expected


@pytest.mark.parametrize("name", CARD_ANSWERS)
def test_answers_of_a_card_are_told_apart_by_chip(name: str, recorded: Recorded) -> None:
    blocks = chip_blocks(recorded(name))
    assert blocks.keys() == {0, 1}
    for chip, values in CARD_ANSWERS[name].items():
        assert {key: blocks[chip].decimal(key) for key in values} == values


@pytest.mark.parametrize("name", CARD_ANSWERS)
def test_blank_lines_are_not_needed(name: str, recorded: Recorded) -> None:
    text = recorded(name)
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    start = next(i for i, line in enumerate(lines) if "Chip Count" in line) + 1
    blocks = chip_blocks("".join(lines[start:]))
    for chip, values in CARD_ANSWERS[name].items():
        assert {key: blocks[chip].decimal(key) for key in values} == values


@pytest.mark.parametrize("name", CARD_ANSWERS)
def test_no_prefix_gives_a_number_to_the_wrong_chip(name: str, recorded: Recorded) -> None:
    text = recorded(name)
    true = chip_blocks(text)
    for length in range(len(text)):
        for chip, block in chip_blocks(text[:length]).items():
            assert block.values.items() <= true[chip].values.items()


@pytest.mark.parametrize("name", SINGLE_ANSWERS)
def test_answers_about_one_thing(name: str, recorded: Recorded) -> None:
    block = single_block(recorded(name))
    assert {k: block.decimal(k) for k in SINGLE_ANSWERS[name]} == SINGLE_ANSWERS[name]


@pytest.mark.parametrize("name", [n for n in SINGLE_ANSWERS if n != "board_300iduo_one_chip"])
def test_no_prefix_gives_another_number(name: str, recorded: Recorded) -> None:
    text = recorded(name)
    true = single_block(text).values
    for length in range(len(text)):
        assert single_block(text[:length]).values.items() <= true.items()


@pytest.mark.parametrize("name", WORDS)
def test_words_of_the_board(name: str, recorded: Recorded) -> None:
    assert WORDS[name].items() <= single_block(recorded(name)).values.items()


def test_a_value_of_two_chips_is_nobodys(recorded: Recorded) -> None:
    assert single_block(recorded("temp_300iduo_card")).values.get("temperature(c)") is None


def test_power_of_the_card(recorded: Recorded) -> None:
    assert smi_parser.parse_power(recorded("power_300iduo_card")) == 118.4
    assert smi_parser.parse_power(recorded("common_300iduo")) == 118.4
    refused = recorded("power_300iduo_chip_not_supported")
    assert smi_parser.parse_power(refused) is None
    assert smi_parser.is_unsupported(refused)
    assert smi_parser.find_failure(refused) is None


def test_sensors_of_the_controller_may_have_no_value(recorded: Recorded) -> None:
    last = parse_blocks(recorded("temp_300iduo_card"))[-1]
    assert (last.decimal("lm75a_te(c)"), last.decimal("lm75b_te(c)")) == (58, None)


def test_health_and_its_codes(recorded: Recorded) -> None:
    assert smi_parser.parse_error_codes(recorded("health_300iduo_one_chip_ok")) == ()
    fault = recorded("health_300iduo_one_chip_fault")
    assert smi_parser.parse_error_codes(fault) == ("80E01801", "80C98009")
    assert smi_parser.parse_error_codes("Error Code : 80E0 none\n") is None
    values = single_block(fault).values
    assert values["health status"] == "Alarm"
    assert values["error information"] == (
        "node type=memory, sensor type=ecc, event state=multi bit error; "
        "node type=chip, sensor type=temperature, event state=over threshold"
    )
    of_card = chip_blocks(recorded("health_300iduo_card"))
    assert {chip: b.values["health"] for chip, b in of_card.items()} == {0: "OK", 1: "Warning"}


def test_ecc(recorded: Recorded) -> None:
    assert smi_parser.parse_ecc_enabled(recorded("ecc_enable_300iduo_on")) is True
    assert smi_parser.parse_ecc_enabled(recorded("ecc_enable_300iduo_off")) is False
    assert smi_parser.parse_ecc_enabled(recorded("error_query_failed")) is None
    assert smi_parser.parse_ecc_counts(recorded("ecc_300iduo_one_chip")) == (0, 0)
    assert smi_parser.parse_ecc_counts(recorded("error_query_failed")) == (None, None)


def test_bandwidth_by_chip(recorded: Recorded) -> None:
    assert smi_parser.parse_bandwidth(recorded("usages_300iduo_card")) == {0: 0.64, 1: 0.63}


def test_processes_of_one_chip(recorded: Recorded) -> None:
    text = recorded("proc_mem_one_chip")
    assert smi_parser.parse_process_memory(text) == ((481516, 38912 * MIB),)
    assert all(not smi_parser.parse_process_memory(text[:n]) for n in range(len(text)))


def test_map_of_device_indices(recorded: Recorded) -> None:
    chips = [(2, 0, 0), (2, 1, 1), (5, 0, 2), (5, 1, 3)]
    true = tuple(ChipIdentity(*ids, "Ascend 310P3") for ids in chips)
    text = recorded("map_m_300iduo")
    assert smi_parser.parse_map(text) == true
    assert smi_parser.parse_map(recorded("map_m_unusable_card")) == true[:2]
    assert all(set(smi_parser.parse_map(text[:n])) <= set(true) for n in range(len(text)))


def test_list_of_cards_and_products(recorded: Recorded) -> None:
    cards = parse_blocks(recorded("list_l_300iduo"))
    assert [(b.whole("npu id"), b.whole("chip count")) for b in cards[1:]] == [(2, 2), (5, 2)]
    products = chip_blocks(recorded("product_300iduo_card"))
    assert {b.values["product type"] for b in products.values()} == {"Atlas 300I Duo"}


def test_columns_of_the_endless_list(recorded: Recorded) -> None:
    rows = parse_columns(recorded("watch_300iduo"), "NpuID(Idx)")
    assert len(rows) == 8
    assert [decimal(row["Temp(C)"]) for row in rows] == [77, 75, 78, 45, 77, 75, 78, None]
    assert {decimal(row["Pwr(W)"]) for row in rows} == {None}
    assert [decimal(row["Memory BW(%)"]) for row in rows][:4] == [64, 63, 65, 0]


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line_with_a_remedy(name: str, recorded: Recorded) -> None:
    text = recorded(name)
    found = smi_parser.find_failure(text)
    assert found is not None
    assert ERRORS[name] in found
    assert text.splitlines()[-1] in found
    assert "\n" not in found
    assert smi_parser.find_failure(text[:-1].removesuffix(text.splitlines()[-1])) is None


@pytest.mark.parametrize("name", sorted({*LAYOUTS, *CARD_ANSWERS, *SINGLE_ANSWERS, *NAMED}))
def test_good_answers_are_no_errors(name: str, recorded: Recorded) -> None:
    assert smi_parser.find_failure(recorded(name)) is None


def test_an_unknown_code_is_reported_too() -> None:
    assert smi_parser.find_failure("dcmi open failed. ret is -8999\n") == (
        "npu-smi: dcmi open failed. ret is -8999; see `dmesg` and the driver log"
    )


@pytest.mark.parametrize("text", ["", "12", "1 2", "1e5", "nan", "inf", "0x10", "١٢", "1" * 30])
def test_numbers_are_nothing_but_numbers(text: str) -> None:
    assert Block({"k": text}).whole("k") == (12 if text == "12" else None)
    assert Block({"k": text}).decimal("k") == (12 if text == "12" else None)
