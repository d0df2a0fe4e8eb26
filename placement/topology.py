"""Chips, the cards that carry them, and the numbering of ranks over both.

Owns the built-in chip profiles. Asks no device: measured memory comes in as `Chip.memory_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class ChipProfile:
    """What a kind of chip offers. `usable_bytes` has one entry for each chip of a card.

    `reserve_bytes` stay free for the runtime, its context and fragmentation. Bandwidth and
    arithmetic are nominal figures of the vendor: an estimate made with them is a bound.
    """

    name: str
    usable_bytes: tuple[int, ...]
    bandwidth_bytes_per_s: float
    fp16_flops: float
    reserve_bytes: int
    collective_bytes: int  # buffers of one communicator
    source: str


PROFILES: Mapping[str, ChipProfile] = {
    profile.name: profile
    for profile in (
        ChipProfile(
            "cpu", (4 * GIB,), 20e9, 1e11, 256 * MIB, 0,
            "4 GiB a rank is a default of ours, not a limit of the machine",
        ),
        # Total memory of chips 0 and 1 as npu-smi prints it; its MB are MiB. HCCL takes twice
        # HCCL_BUFFSIZE (default 200 MB) for each communicator.
        ChipProfile(
            "310p3", (44278 * MIB, 43693 * MIB), 204e9, 70e12, 2 * GIB, 2 * 200 * MIB,
            "npu-smi totals of an Atlas 300I Duo; 204 GB/s and 70 TFLOPS fp16 a chip (Huawei)",
        ),
        ChipProfile(
            "cuda", (16 * GIB,), 300e9, 60e12, 1 * GIB, 256 * MIB,
            "16 GiB assumed; set usable_bytes or chip_profile for the real device",
        ),
        ChipProfile(
            "h200", (139 * GIB,), 4.8e12, 989e12, 2 * GIB, 256 * MIB,
            "139 GiB usable, 4.8 TB/s and 989 TFLOPS dense fp16 (NVIDIA data sheet)",
        ),
    )
}  # fmt: skip
DEFAULT_PROFILES: Mapping[str, str] = {"cpu": "cpu", "cuda": "cuda", "npu": "310p3"}


@dataclass(frozen=True)
class Chip:
    """One device: its physical index, its board, and its memory."""

    index: int
    card: int
    memory_bytes: int


@dataclass(frozen=True)
class Topology:
    profile: ChipProfile
    chips: tuple[Chip, ...]

    def chip(self, index: int) -> Chip:
        for chip in self.chips:
            if chip.index == index:
                return chip
        known = ", ".join(str(chip.index) for chip in self.chips)
        raise ConfigError(f"chip {index} does not exist here, chips: {known}")


@dataclass(frozen=True)
class RankOrder:
    """`order[rank]` is the position of its chip in the sequence given to `number_ranks`.

    `split_pairs` are the pairs of ranks (2k, 2k+1) whose chips lie on two cards.
    """

    order: tuple[int, ...]
    split_pairs: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


def find_profile(device: str, name: str = "") -> ChipProfile:
    """The named profile, or the device's default. ConfigError lists what exists."""
    if not name and device not in DEFAULT_PROFILES:
        raise ConfigError(f"device = {device!r}, supported: {', '.join(DEFAULT_PROFILES)}")
    profile = PROFILES.get(name or DEFAULT_PROFILES[device])
    if profile is None:
        raise ConfigError(f"chip profile {name!r} is unknown, known: {', '.join(PROFILES)}")
    return profile


def emulated_topology(num_chips: int, profile: ChipProfile, usable_bytes: int = 0) -> Topology:
    """Cards of two chips, numbered as on a real box. `usable_bytes` overrides the profile's."""
    sizes = (usable_bytes,) if usable_bytes else profile.usable_bytes
    chips = (Chip(i, i // 2, sizes[i % 2 % len(sizes)]) for i in range(num_chips))
    return Topology(profile, tuple(chips))


def number_ranks(chips: Sequence[int], topology: Topology) -> RankOrder:
    """Numbers the ranks on these physical chips so that ranks 2k and 2k+1 share a card.

    Chips that are alone on their card come last. ConfigError for a chip named twice or unknown.
    """
    if len(set(chips)) != len(chips):
        twice = sorted({chip for chip in chips if list(chips).count(chip) > 1})
        raise ConfigError(f"chips {twice} are given to two ranks each; one rank a chip")
    by_card: dict[int, list[int]] = {}
    for index in sorted(chips):
        by_card.setdefault(topology.chip(index).card, []).append(index)
    ordered = [index for pair in _pairs(by_card) for index in pair]
    cards = [topology.chip(index).card for index in ordered]
    split = tuple(
        (rank, rank + 1) for rank in range(0, len(cards) - 1, 2) if cards[rank] != cards[rank + 1]
    )
    notes = tuple(
        f"ranks {a} and {b} are on two cards ({cards[a]} and {cards[b]}): a pair is split"
        for a, b in split
    )
    return RankOrder(tuple(list(chips).index(index) for index in ordered), split, notes)


def _pairs(by_card: Mapping[int, list[int]]) -> list[list[int]]:
    """Whole pairs in card order, then the chips left over, one each."""
    pairs, singles = [], []
    for indices in by_card.values():
        whole = len(indices) // 2 * 2
        pairs += [indices[i : i + 2] for i in range(0, whole, 2)]
        singles += [[index] for index in indices[whole:]]
    return pairs + singles
