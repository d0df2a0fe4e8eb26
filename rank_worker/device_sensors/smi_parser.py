"""Answers of `npu-smi info -t ...` and `-m` as values, and what its error lines mean.

The table of `npu-smi info` is read by smi_table.py. Runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rank_worker.device_sensors.smi_text import (
    MIB,
    chip_blocks,
    finished_lines,
    flag,
    hex_codes,
    parse_columns,
    single_block,
    whole,
)

PROCESS = re.compile(r"Process id:(\d+)\s+Process name:.*?\s+Process memory\(MB\):(\d+)")
# Of libdcmi's codes those that an operator can do something about.
REMEDIES: Mapping[str, str] = {
    "-8002": "not permitted: run as root or add the user to the group of /dev/davinci*",
    "-8005": "the driver is not loaded: look at `dmesg`, install or reload the driver",
    "-8006": "the driver did not answer in time: look at `dmesg`, then reset the card",
    "-8020": "a container without privileges has the device mounted: stop it or run nrank there",
    "-9005": "the board does not answer: look at `dmesg` and `lspci -d 19e5:`, then reset the card",
}
FAILURES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"There is no NPU card"), "look at `lspci -d 19e5:` and at the card's power"),
    (re.compile(r"Error parameter of \S+"), "this npu-smi does not know the query: update it"),
    (re.compile(r"Failed to query "), "look at the chip's health and at `dmesg`"),
)
RETURNED = re.compile(r"\bret is (-\d+)")
UNSUPPORTED = re.compile(r"This device does not support querying ")


@dataclass(frozen=True, slots=True)
class ChipIdentity:
    """A row of `npu-smi info -m`: which device index a chip has."""

    npu_id: int
    chip_id: int
    device_index: int
    name: str


def find_failure(text: str) -> str | None:
    """The error that npu-smi printed and what to do about it, in one line; None without one.

    Its exit code proves nothing: some errors come with 0.
    """
    for line in (line.strip() for line in finished_lines(text)):
        if code := RETURNED.search(line):
            return f"npu-smi: {line}; {REMEDIES.get(code[1], 'see `dmesg` and the driver log')}"
        for pattern, remedy in FAILURES:
            if pattern.match(line):
                return f"npu-smi: {line}; {remedy}"
    return None


def is_unsupported(text: str) -> bool:
    """The chip has no such sensor: asking again is of no use."""
    return any(UNSUPPORTED.match(line.strip()) for line in finished_lines(text))


def parse_map(text: str) -> tuple[ChipIdentity, ...]:
    """`info -m`: chips that can be used. Controllers have no device index, broken cards id -1."""
    found: list[ChipIdentity] = []
    for row in parse_columns(text, "NPU ID"):
        npu_id, chip_id = whole(row.get("NPU ID")), whole(row.get("Chip ID"))
        index = whole(row.get("Chip Logic ID"))
        if npu_id is None or chip_id is None or index is None or npu_id < 0:
            continue
        found.append(ChipIdentity(npu_id, chip_id, index, row.get("Chip Name", "")))
    return tuple(found)


def parse_bandwidth(text: str) -> Mapping[int, float | None]:
    """`-t usages -i N`: use of the memory bandwidth, 0..1, by chip."""
    return {
        chip: next(
            (
                ratio
                for memory in ("hbm", "ddr")
                if (ratio := block.ratio(f"{memory} bandwidth usage rate(%)")) is not None
            ),
            None,
        )
        for chip, block in chip_blocks(text).items()
    }


def parse_power(text: str) -> float | None:
    """`-t power -i N`: watts of the whole card, from the board's controller."""
    block = single_block(text)
    power = block.decimal("power dissipation(w)")
    return power if power is not None else block.decimal("npu real-time power(w)")


def parse_error_codes(text: str) -> tuple[str, ...] | None:
    """`-t health -i N -c M`: the codes of its faults, () where it says that there are none."""
    return hex_codes(single_block(text).values.get("error code"))


def parse_ecc_counts(text: str) -> tuple[int | None, int | None]:
    """`-t ecc -i N -c M`: errors of one and of two bits since the driver started."""
    block = single_block(text)
    for memory in ("hbm", "ddr"):
        single = block.whole(f"{memory} single bit error count")
        double = block.whole(f"{memory} double bit error count")
        if single is not None or double is not None:
            return single, double
    return None, None


def parse_ecc_enabled(text: str) -> bool | None:
    """`-t ecc-enable -i N`, which asks the card's first chip for all of them."""
    values = single_block(text).values
    found = [flag(values.get(f"{memory} ecc-enable status")) for memory in ("hbm", "ddr")]
    return next((value for value in found if value is not None), None)


def parse_process_memory(text: str) -> tuple[tuple[int, int], ...]:
    """`-t proc-mem -i N -c M`: pid and bytes of each process on the chip."""
    matches = [PROCESS.fullmatch(line.strip()) for line in finished_lines(text)]
    return tuple((int(m[1]), int(m[2]) * MIB) for m in matches if m)
