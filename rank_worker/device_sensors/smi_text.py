"""Shapes of text that npu-smi prints: key lines in blocks, columns, and exact numbers in cells.

Owns what is common to all layouts. Knows no chip. A last line without its line end was cut off and
is never read: 44278 cut to 442 would be a wrong number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rank_worker.device_sensors.reading import plausible_celsius, plausible_ratio

MIB = 1 << 20
CHIP_KEY = "chip id"
NO_VALUE = {"", "NA", "N/A", "-", "--"}


@dataclass
class Block:
    """Key lines that belong together: those of a chip, of the board's controller or of a card.

    Keys are lower case, with single blanks and none before a bracket.
    """

    values: dict[str, str] = field(default_factory=dict)

    @property
    def chip_id(self) -> int | None:
        return whole(self.values.get(CHIP_KEY))

    def whole(self, key: str) -> int | None:
        return whole(self.values.get(key))

    def decimal(self, key: str) -> float | None:
        return decimal(self.values.get(key))

    def ratio(self, key: str) -> float | None:
        return percent(self.values.get(key))


def finished_lines(text: str) -> list[str]:
    """Lines that ended in a line end, without it."""
    return [line.rstrip("\r") for line in text.split("\n")[:-1]]


def parse_blocks(text: str) -> list[Block]:
    """Blocks of `key : value` lines, split at blank lines and where a key would come twice.

    Some queries print the chip's number first and some last, so that a block has to end before it
    is known whose it is. A line without a key goes on with the value before.
    """
    blocks: list[Block] = []
    starts, last = True, ""
    for line in finished_lines(text):
        name, colon, value = line.partition(":")
        key, value = _key(name), value.strip()
        if not line.strip():
            starts = True
        elif not key and colon and blocks and last:
            blocks[-1].values[last] += f"; {value}"
        elif key and colon:
            if starts or key in blocks[-1].values:
                blocks.append(Block())
            blocks[-1].values[key] = value
            starts, last = False, key
    return blocks


def chip_blocks(text: str) -> Mapping[int, Block]:
    """Blocks that name their chip, by its number. A number that comes twice is left out."""
    found: dict[int, Block] = {}
    twice: set[int] = set()
    for block in parse_blocks(text):
        chip = block.chip_id
        if chip is None:
            continue
        twice |= {chip} & found.keys()
        found[chip] = block
    return {chip: block for chip, block in found.items() if chip not in twice}


def single_block(text: str) -> Block:
    """The answer to a query about one chip or one card: all its key lines.

    A key that comes twice belongs to several chips and is left out.
    """
    values: dict[str, str] = {}
    twice: set[str] = set()
    for block in parse_blocks(text):
        twice |= block.values.keys() & values.keys()
        values |= block.values
    return Block({key: value for key, value in values.items() if key not in twice})


def parse_columns(text: str, first: str) -> list[Mapping[str, str]]:
    """Rows under a header line that begins with `first`; cells lie two blanks or more apart.

    Rows with more or fewer cells than the header are left out; a header may come again.
    """
    header: list[str] = []
    rows: list[Mapping[str, str]] = []
    for line in finished_lines(text):
        cells = re.split(r"\s{2,}", line.strip())
        if line.strip().startswith(first):
            # A unit in brackets ends a name too: `Ctrl Cpu(%) Memory(%)`.
            header = re.split(r"\s{2,}|(?<=\))\s+", line.strip())
        elif header and len(cells) == len(header):
            rows.append(dict(zip(header, cells, strict=True)))
    return rows


def whole(text: str | None) -> int | None:
    """A whole number that is nothing else, at most 18 digits."""
    return int(text) if text and re.fullmatch(r"-?[0-9]{1,18}", text) else None


def decimal(text: str | None) -> float | None:
    return float(text) if text and re.fullmatch(r"-?[0-9]{1,9}(\.[0-9]{1,9})?", text) else None


def percent(text: str | None) -> float | None:
    return plausible_ratio(decimal(text))


def celsius(text: str | None) -> float | None:
    return plausible_celsius(decimal(text))


def flag(text: str | None) -> bool | None:
    return {"True": True, "False": False}.get(text or "")


def hex_codes(text: str | None) -> tuple[str, ...] | None:
    """Codes of a list such as `80E01801 80C98009`; none at all where it says NA."""
    if text is None:
        return None
    if text in NO_VALUE:
        return ()
    codes = re.split(r"[\s,;]+", text)
    good = all(re.fullmatch(r"(0x)?[0-9A-Fa-f]{1,8}", code) for code in codes)
    return tuple(code.removeprefix("0x").upper() for code in codes) if good else None


def _key(text: str) -> str:
    return re.sub(r"\s+(?=\()", "", " ".join(text.split())).lower()
