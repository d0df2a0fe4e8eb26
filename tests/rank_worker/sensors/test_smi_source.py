"""Readings from npu-smi: the table at every poll, the rest one call at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from rank_worker.device_sensors import smi, smi_queries
from rank_worker.device_sensors.smi import SmiSource
from rank_worker.device_sensors.smi_queries import SmiQueries
from rank_worker.device_sensors.smi_table import parse_info
from tests.rank_worker.sensors.conftest import FakeSmi

MIB = 1 << 20
Recorded = Callable[[str], str]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smi, "SLOW_S", 60.0)


def two_cards(recorded: Recorded) -> dict[str, str]:
    answers = {"info": recorded("info_300iduo_all_dash_separators")}
    for card in (2, 5):
        answers[f"info__t_ecc_enable__i_{card}"] = recorded("ecc_enable_300iduo_on")
        answers[f"info__t_usages__i_{card}"] = recorded("usages_300iduo_card")
        answers[f"info__t_power__i_{card}"] = recorded("power_300iduo_card")
        for chip in (0, 1):
            name = f"__i_{card}__c_{chip}"
            answers[f"info__t_health{name}"] = recorded("health_300iduo_one_chip_fault")
            answers[f"info__t_ecc{name}"] = recorded("ecc_300iduo_one_chip")
            answers[f"info__t_proc_mem{name}"] = recorded("proc_mem_one_chip")
    # The names of queries have minus signs where those of keywords can't.
    return {
        name.replace("ecc_enable", "ecc-enable").replace("proc_mem", "proc-mem"): text
        for name, text in answers.items()
    }


def test_all_fields_are_there_after_a_round(smi: FakeSmi, recorded: Recorded) -> None:
    smi.answers(**two_cards(recorded))
    source = SmiSource(smi.program())
    first = source.read()
    assert first.error is None
    assert first.source == "npu-smi"
    assert [chip.device_index for chip in first.chips] == [0, 1, 2, 3]
    for _ in range(17):  # 3 queries a card and 3 a chip, one of them done
        reading = source.read()
    chip = reading.chips[1]
    assert (chip.temperature_celsius, chip.memory_total_bytes) == (42, 43691 * MIB)
    assert (chip.bandwidth_utilisation_ratio, chip.ecc_enabled) == (0.63, True)
    assert (chip.ecc_single_bit, chip.ecc_double_bit) == (0, 0)
    assert chip.error_codes == ("80E01801", "80C98009")
    assert chip.processes == ((481516, 38912 * MIB),)
    assert chip.shutdown_celsius is None
    assert [(card.npu_id, card.power_watts) for card in reading.cards] == [(2, 118.4), (5, 118.4)]
    counted = Counter(smi.calls())
    assert counted.pop("info") == 18
    assert set(counted.values()) == {1}
    assert len(counted) == 18
    assert smi.overlaps() == []


def test_two_chips_of_one_card_stay_apart_by_rank(smi: FakeSmi, recorded: Recorded) -> None:
    smi.answers(**two_cards(recorded))
    reading = SmiSource(smi.program()).read()
    by_rank = reading.by_rank([3, 0, 9])
    assert {rank: chip.key for rank, chip in by_rank.items()} == {0: (5, 1), 1: (2, 0)}


def test_indices_come_from_the_map_where_the_table_has_none(
    smi: FakeSmi, recorded: Recorded
) -> None:
    table = recorded("info_300iduo_two_cards_idle").replace("Chip    Device", "Chip          ")
    for device in range(4):
        table = table.replace(f"| {device % 2}       {device} ", f"| {device % 2}         ")
    smi.answers(info=table, info__m=recorded("map_m_300iduo"))
    reading = SmiSource(smi.program()).read()
    assert [chip.device_index for chip in reading.chips] == [0, 1, 2, 3]


def test_a_query_that_fails_costs_its_fields_only(smi: FakeSmi, recorded: Recorded) -> None:
    smi.answers(info=recorded("info_300iduo_busy_processes"))
    source = SmiSource(smi.program())
    readings = [source.read() for _ in range(4)]
    assert {reading.error for reading in readings} == {None}
    assert readings[-1].chips[0].ecc_enabled is None
    assert readings[-1].chips[0].temperature_celsius == 77
    assert readings[-1].chips[0].processes == ((481516, 38912 * MIB),)


def test_a_slow_program_is_asked_for_its_table_only(
    smi: FakeSmi, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rank_worker.device_sensors.smi.SLOW_S", 0.0)
    smi.answers(**two_cards(recorded))
    source = SmiSource(smi.program())
    assert [len(source.read().chips) for _ in range(3)] == [4, 4, 4]
    assert smi.calls() == ["info"] * 3


def test_queries_rest_after_their_round_and_old_answers_go(
    smi: FakeSmi, recorded: Recorded
) -> None:
    refused = recorded("power_300iduo_chip_not_supported")
    smi.answers(
        **{"info__t_ecc-enable__i_7": recorded("ecc_enable_300iduo_off")},
        info__t_power__i_7=refused,
    )
    now = [1000.0]
    queries = SmiQueries(smi.program(), lambda: now[0])
    table = parse_info(recorded("info_310p_driver_22_old_layout"))
    for _ in range(10):
        queries.ask_one(table)
    assert len(smi.calls()) == 6
    assert queries.add_to(table)[0][0].ecc_enabled is False
    now[0] += smi_queries.INTERVAL_S
    for _ in range(10):
        queries.ask_one(table)
    assert Counter(smi.calls())["info -t power -i 7"] == 1  # refused: not asked for so long
    assert Counter(smi.calls())["info -t ecc-enable -i 7"] == 2
    now[0] += smi_queries.KEPT_S + 1
    assert queries.add_to(table)[0][0].ecc_enabled is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "printed no chip that nrank can read: 'nothing'"),
        ("garbage\n", "printed no chip that nrank can read: 'garbage'"),
        ("There is no NPU card on this server.\n", "lspci"),
        ("dcmi module initialize failed. ret is -8005\n", "reload the driver"),
    ],
)
def test_no_chips_is_an_error_with_its_remedy(smi: FakeSmi, text: str, words: str) -> None:
    smi.answers(info=text)
    reading = SmiSource(smi.program()).read()
    assert reading.chips == ()
    assert reading.error is not None
    assert words in reading.error


def test_half_a_table_gives_the_chips_that_are_whole(smi: FakeSmi, recorded: Recorded) -> None:
    smi.answers(info=recorded("info_300iduo_two_cards_idle")[:1200])
    reading = SmiSource(smi.program()).read()
    assert [(c.key, c.temperature_celsius) for c in reading.chips] == [((2, 0), 44), ((2, 1), 42)]
