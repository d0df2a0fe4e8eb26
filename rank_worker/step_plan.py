"""The step plan: what every rank does in one step, as a versioned message of 32-bit integers.

Rank 0's scheduler makes it, all ranks execute it. A decode row names its slot, not its token:
the last sampled token of a slot and its drafts live on the device. Knows no tensors and no
requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

import numpy as np

from placement.errors import RankError

VERSION = 2
_HEADER_WORDS = 9
_ADMIT_WORDS = 8
_PAGE_WORDS = 3
_ROW_WORDS = 5


class Opcode(IntEnum):
    STEP = 1
    IDLE = 2  # heartbeat: the gang is alive, nothing to compute
    STOP = 3


class RowFlag(IntFlag):
    """`PREFILL` and `DRAFT` are explicit: never inferred from a row's token count."""

    NONE = 0
    PREFILL = 1  # token ids are in the plan; otherwise the slot's last token on the device
    SAMPLE = 2  # the row ends at the sequence's last known token, so a next one is sampled
    DRAFT = 4  # the slot's last token and its drafts, all of them to be verified
    ENTER = 8  # the row's tokens enter the draft head's cache
    PROPOSE = 16  # new drafts are made for the slot; needs SAMPLE and ENTER


@dataclass(frozen=True)
class Admit:
    """A slot handed to a sequence: its state is zeroed, its sampling parameters set."""

    slot: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int


@dataclass(frozen=True)
class PageUpdate:
    slot: int
    index: int  # position in the slot's page table
    page: int


@dataclass(frozen=True)
class Row:
    """`count` tokens of the sequence in `slot`, the first at absolute position `start`.

    `next_token` follows the row where it is known (inside a prompt); the draft head needs it.
    """

    slot: int
    start: int
    count: int
    flags: RowFlag
    next_token: int = 0


@dataclass(frozen=True)
class StepPlan:
    opcode: Opcode
    epoch: int
    step: int
    check: bool = False  # compare the ranks' decisions after this step
    admits: tuple[Admit, ...] = ()
    page_updates: tuple[PageUpdate, ...] = ()
    rows: tuple[Row, ...] = ()  # decode rows first, equal widths together
    token_ids: tuple[int, ...] = field(default=())  # prefill rows' tokens, in row order


def _float_bits(values: list[float]) -> np.ndarray:
    return np.asarray(values, dtype=np.float32).view(np.int32)


def encode(plan: StepPlan) -> np.ndarray:
    """The plan as int32 words."""
    header = [
        VERSION, plan.opcode, plan.epoch, plan.step, int(plan.check),
        len(plan.admits), len(plan.page_updates), len(plan.rows), len(plan.token_ids),
    ]  # fmt: skip
    words = list(header)
    for a in plan.admits:
        t, p, m = _float_bits([a.temperature, a.top_p, a.min_p]).tolist()
        low, high = np.asarray([a.seed & 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.int32).tolist()
        words += [a.slot, t, a.top_k, p, m, low, high, a.choice]
    for u in plan.page_updates:
        words += [u.slot, u.index, u.page]
    for r in plan.rows:
        words += [r.slot, r.start, r.count, int(r.flags), r.next_token]
    words += plan.token_ids
    return np.asarray(words, dtype=np.int32)


def decode(words: np.ndarray) -> StepPlan:
    """The plan in `words`; RankError when the message is of another version or cut."""
    if len(words) < _HEADER_WORDS or int(words[0]) != VERSION:
        raise RankError(f"step plan version {int(words[0]) if len(words) else -1}, not {VERSION}")
    _, opcode, epoch, step, check, num_admits, num_pages, num_rows, num_tokens = words[
        :_HEADER_WORDS
    ].tolist()
    records = num_admits * _ADMIT_WORDS + num_pages * _PAGE_WORDS + num_rows * _ROW_WORDS
    if min(num_admits, num_pages, num_rows, num_tokens) < 0 or (
        len(words) != _HEADER_WORDS + records + num_tokens
    ):
        raise RankError(
            f"step plan of {len(words)} words, not {_HEADER_WORDS + records + num_tokens}",
            step=step, phase="plan",
        )  # fmt: skip
    at = _HEADER_WORDS
    admits, at = _take(words, at, num_admits, _ADMIT_WORDS)
    pages, at = _take(words, at, num_pages, _PAGE_WORDS)
    rows, at = _take(words, at, num_rows, _ROW_WORDS)
    return StepPlan(
        opcode=Opcode(opcode),
        epoch=epoch,
        step=step,
        check=bool(check),
        admits=tuple(_admit(record) for record in admits),
        page_updates=tuple(PageUpdate(*record.tolist()) for record in pages),
        rows=tuple(Row(s, p, n, RowFlag(f), t) for s, p, n, f, t in rows.tolist()),
        token_ids=tuple(words[at:].tolist()),
    )


def _take(words: np.ndarray, at: int, count: int, size: int) -> tuple[np.ndarray, int]:
    end = at + count * size
    return words[at:end].reshape(count, size), end


def _admit(record: np.ndarray) -> Admit:
    slot, _, top_k, _, _, _, _, choice = record.tolist()
    temperature, _, top_p, min_p = record[1:5].view(np.float32).tolist()
    seed = int(np.ascontiguousarray(record[5:7]).view(np.uint64)[0])
    return Admit(slot, temperature, top_k, top_p, min_p, seed, choice)
