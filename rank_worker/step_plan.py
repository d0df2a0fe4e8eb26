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

VERSION = 4
_HEADER_WORDS = 10
_ADMIT_WORDS = 9
_PAGE_WORDS = 3
_COPY_WORDS = 3
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
    SCORE = 32  # log-probabilities of the tokens that follow each of the row's, where known


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
    num_logprobs: int = -1  # candidates reported beside each token's; -1: nothing is reported


class CopyKind(IntEnum):
    """Between a sequence's slot and the cells that keep states of prefixes."""

    SAVE = 1  # slot -> device cell
    SPILL = 2  # device cell -> host cell
    RESTORE = 3  # device cell -> slot
    FETCH = 4  # host cell -> slot


INTO_SLOT = (CopyKind.RESTORE, CopyKind.FETCH)


@dataclass(frozen=True)
class StateCopy:
    """A state to copy before the step; `source` and `target` are numbers of slots or cells."""

    kind: CopyKind
    source: int
    target: int


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


def score_count(row: Row) -> int:
    """Tokens of a row that are scored: all whose next one is known."""
    return row.count - bool(row.flags & RowFlag.SAMPLE) if row.flags & RowFlag.SCORE else 0


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
    copies: tuple[StateCopy, ...] = ()  # into cells before the admits, into slots after them


def _float_bits(values: list[float]) -> np.ndarray:
    return np.asarray(values, dtype=np.float32).view(np.int32)


def encode(plan: StepPlan) -> np.ndarray:
    """The plan as int32 words."""
    header = [
        VERSION, plan.opcode, plan.epoch, plan.step, int(plan.check),
        len(plan.copies), len(plan.admits), len(plan.page_updates), len(plan.rows),
        len(plan.token_ids),
    ]  # fmt: skip
    words = list(header)
    for c in plan.copies:
        words += [int(c.kind), c.source, c.target]
    for a in plan.admits:
        t, p, m = _float_bits([a.temperature, a.top_p, a.min_p]).tolist()
        low, high = np.asarray([a.seed & 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.int32).tolist()
        words += [a.slot, t, a.top_k, p, m, low, high, a.choice, a.num_logprobs]
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
    _, opcode, epoch, step, check, *counts = words[:_HEADER_WORDS].tolist()
    num_copies, num_admits, num_pages, num_rows, num_tokens = counts
    records = num_copies * _COPY_WORDS + num_admits * _ADMIT_WORDS
    records += num_pages * _PAGE_WORDS + num_rows * _ROW_WORDS
    if min(counts) < 0 or len(words) != _HEADER_WORDS + records + num_tokens:
        raise RankError(
            f"step plan of {len(words)} words, not {_HEADER_WORDS + records + num_tokens}",
            step=step, phase="plan",
        )  # fmt: skip
    copies, at = _take(words, _HEADER_WORDS, num_copies, _COPY_WORDS)
    admits, at = _take(words, at, num_admits, _ADMIT_WORDS)
    pages, at = _take(words, at, num_pages, _PAGE_WORDS)
    rows, at = _take(words, at, num_rows, _ROW_WORDS)
    return StepPlan(
        opcode=Opcode(opcode),
        epoch=epoch,
        step=step,
        check=bool(check),
        copies=tuple(StateCopy(CopyKind(k), a, b) for k, a, b in copies.tolist()),
        admits=tuple(_admit(record) for record in admits),
        page_updates=tuple(PageUpdate(*record.tolist()) for record in pages),
        rows=tuple(Row(s, p, n, RowFlag(f), t) for s, p, n, f, t in rows.tolist()),
        token_ids=tuple(words[at:].tolist()),
    )


def _take(words: np.ndarray, at: int, count: int, size: int) -> tuple[np.ndarray, int]:
    end = at + count * size
    return words[at:end].reshape(count, size), end


def _admit(record: np.ndarray) -> Admit:
    slot, _, top_k, _, _, _, _, choice, num_logprobs = record.tolist()
    temperature, _, top_p, min_p = record[1:5].view(np.float32).tolist()
    seed = int(np.ascontiguousarray(record[5:7]).view(np.uint64)[0])
    return Admit(slot, temperature, top_k, top_p, min_p, seed, choice, num_logprobs)
