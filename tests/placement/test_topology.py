"""Numbering of ranks over cards, and the built-in chip profiles."""

from __future__ import annotations

import pytest

from placement.errors import ConfigError
from placement.topology import (
    PROFILES,
    Chip,
    Topology,
    emulated_topology,
    find_profile,
    number_ranks,
)

CPU = PROFILES["cpu"]


@pytest.mark.parametrize(
    ("chips", "numbered"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([3, 0, 2, 1], [0, 1, 2, 3]),
        ([5, 1, 4, 0], [0, 1, 4, 5]),
        ([2, 5, 4], [4, 5, 2]),
        ([7], [7]),
    ],
)
def test_ranks_of_a_card_are_neighbours(chips: list[int], numbered: list[int]) -> None:
    result = number_ranks(chips, emulated_topology(8, CPU))
    assert [chips[position] for position in result.order] == numbered
    assert result.split_pairs == ()
    assert result.notes == ()


def test_a_split_card_is_told() -> None:
    result = number_ranks([1, 2, 4, 5], emulated_topology(8, CPU))
    assert [[1, 2, 4, 5][position] for position in result.order] == [4, 5, 1, 2]
    assert result.split_pairs == ((2, 3),)
    assert "ranks 2 and 3 are on two cards (0 and 1)" in result.notes[0]


def test_cards_need_not_be_numbered_like_chips() -> None:
    chips = tuple(Chip(i, card, 1) for i, card in enumerate([7, 3, 7, 3]))
    result = number_ranks([0, 1, 2, 3], Topology(CPU, chips))
    assert result.order == (0, 2, 1, 3)
    assert result.split_pairs == ()


def test_impossible_chips_are_refused() -> None:
    topology = emulated_topology(4, CPU)
    with pytest.raises(ConfigError, match=r"\[1\] are given to two ranks"):
        number_ranks([0, 1, 1], topology)
    with pytest.raises(ConfigError, match="chip 9 does not exist here, chips: 0, 1, 2, 3"):
        number_ranks([0, 9], topology)


def test_chips_of_a_card_differ_in_memory() -> None:
    chips = emulated_topology(4, find_profile("npu")).chips
    assert [chip.memory_bytes >> 20 for chip in chips] == [44278, 43693, 44278, 43693]
    assert [chip.card for chip in chips] == [0, 0, 1, 1]
    assert {c.memory_bytes for c in emulated_topology(3, find_profile("npu"), 5).chips} == {5}


def test_profiles_by_device_and_name() -> None:
    assert find_profile("cpu").usable_bytes == (4 << 30,)
    assert find_profile("cpu", "310p3").name == "310p3"
    with pytest.raises(ConfigError, match="chip profile '910z' is unknown, known: cpu, 310p3"):
        find_profile("npu", "910z")
    with pytest.raises(ConfigError, match="device = 'tpu', supported: cpu, cuda, npu"):
        find_profile("tpu")
