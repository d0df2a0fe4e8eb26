"""Chips, the cards that carry them, and the numbering of ranks over both.

Owns the built-in chip profiles. Asks no device: measured memory comes in as `Chip.memory_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.errors import ConfigError

MIB = 1 << 20
WIDENED_BYTES = 128 * MIB  # of packed weights that operators of a 310P have wide at once
GIB = 1 << 30


@dataclass(frozen=True)
class ChipProfile:
    """What a kind of chip offers. `usable_bytes` has one entry for each chip of a card.

    `reserve_bytes` stay free for the runtime, its context and fragmentation. Bandwidth and
    arithmetic are nominal figures of the vendor: an estimate made with them is a bound. `source`
    and `latency_source` say where the figures are from.
    """

    name: str
    device: str
    usable_bytes: tuple[int, ...]
    bandwidth_bytes_per_s: float
    fp16_flops: float
    reserve_bytes: int
    source: str
    collective_buffer_bytes: int = 0  # of one communicator; 0: shared memory of the host
    collective_buffers: int = 1  # how many of these a communicator takes
    collective_latency_s: float = 20e-6  # of a small all-reduce
    latency_source: str = "20 us a small all-reduce, a guess of ours"
    allocation_bytes: int = 1  # the allocator's unit
    allocation_extra_bytes: int = 0  # that it adds to each tensor before it rounds up
    fractal_layout: bool = False  # weights of matrix products lie in 16 x 32-byte tiles
    graph_bytes: int = 0  # captured decode graphs
    graph_draft_bytes: int = 0  # what each draft token of a step adds to them
    missing_dtypes: tuple[str, ...] = ()  # that chips of this name don't compute in
    widened_bytes: int = 0  # of packed weights that are wide at once, where products need them so

    @property
    def collective_bytes(self) -> int:
        """Buffers of one communicator; a gang has one."""
        return self.collective_buffer_bytes * self.collective_buffers


PROFILES: Mapping[str, ChipProfile] = {
    profile.name: profile
    for profile in (
        ChipProfile(
            name="cpu",
            device="cpu",
            usable_bytes=(4 * GIB,),
            bandwidth_bytes_per_s=20e9,
            fp16_flops=1e11,
            reserve_bytes=256 * MIB,
            source="4 GiB a rank is a default of ours, not a limit of the machine",
        ),
        # Total memory of chips 0 and 1 as npu-smi prints it; its MB are MiB. Graphs: 0.30, 0.38
        # and 0.50 GiB were reported for 1, 2 and 4 drafts, which this line passes through.
        # Latency: 2.7 % transit of 2.35 ms (213 all-reduces in 500 ms), reported for six chips.
        ChipProfile(
            name="310p3",
            device="npu",
            usable_bytes=(44278 * MIB, 43693 * MIB),
            bandwidth_bytes_per_s=204e9,
            fp16_flops=70e12,
            reserve_bytes=2 * GIB,
            source="npu-smi totals of an Atlas 300I Duo with ECC off; 204 GB/s and 70 TFLOPS fp16 "
            "a chip (Huawei); allocations of 32 B more in units of 512 B, FRACTAL_NZ weights "
            "(torch_npu)",
            collective_buffer_bytes=200 * MIB,  # HCCL_BUFFSIZE
            collective_buffers=2,
            collective_latency_s=63e-6,
            latency_source="63 us a small all-reduce: reported transit share of a six-chip trace; "
            "waiting for the slowest rank, most of the time there, is not counted",
            allocation_bytes=512,
            allocation_extra_bytes=32,
            fractal_layout=True,
            graph_bytes=256 * MIB,
            graph_draft_bytes=64 * MIB,
            missing_dtypes=("bfloat16",),
            widened_bytes=WIDENED_BYTES,
        ),
        ChipProfile(
            name="cuda",
            device="cuda",
            usable_bytes=(16 * GIB,),
            bandwidth_bytes_per_s=300e9,
            fp16_flops=60e12,
            reserve_bytes=1 * GIB,
            source="16 GiB assumed; set usable_bytes or chip_profile for the real device",
            collective_buffer_bytes=256 * MIB,
            allocation_bytes=512,
        ),
        ChipProfile(
            name="h200",
            device="cuda",
            usable_bytes=(139 * GIB,),
            bandwidth_bytes_per_s=4.8e12,
            fp16_flops=989e12,
            reserve_bytes=2 * GIB,
            source="139 GiB usable, 4.8 TB/s and 989 TFLOPS dense fp16 (NVIDIA data sheet)",
            collective_buffer_bytes=256 * MIB,
            allocation_bytes=512,
        ),
    )
}
HOST_PROFILE = PROFILES["cpu"]  # memory without padding
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
