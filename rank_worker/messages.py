"""Everything that crosses a process between ingress, coordinator and ranks. No torch here.

Frozen dataclasses of plain values: they pickle small and read the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """Temperature 0 is greedy. `seed` is always set by the time a request reaches a rank."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bit
    choice: int = 0  # index under `n`; keys the random stream together with the seed


@dataclass(frozen=True)
class EngineRequest:
    """An admitted request: validated, tokenised, within the context."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    arrival_s: float = 0.0  # time.time() at the ingress
    logprobs: int = -1  # with each token its log-probability and so many others; -1: none
    prompt_logprobs: bool = False  # the same for the prompt; needs `logprobs`
    rounds_apart: bool = False  # batches of draft rounds are never merged on their way
    priority: int = 0  # the least waits least and is preempted last; equal ones by arrival


@dataclass(frozen=True)
class TokenLogprob:
    """Of one token, and (id, log-probability) of the most probable ones at its place."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of one request made in one step; the last one carries `finish_reason`.

    Counts of tokens are the request's totals so far. Accepted ones are part of the answer.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    time_s: float = 0.0  # time.time() on rank 0 when the step was committed
    error_kind: str | None = None  # placement.errors.ErrorKind value when finish_reason is ERROR
    error_message: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of `token_ids`, where asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the second prompt token on, once


@dataclass(frozen=True)
class RankIdentity:
    """Where a rank actor landed: what placement needs to number the ranks."""

    pid: int
    node: str
    physical_chip: int
    host_address: str
    log_path: str = ""  # on its own node; "": its errors go nowhere that can be read again


@dataclass(frozen=True)
class LoadProgress:
    rank: int
    phase: str  # "starting", "loading", "ready"
    read_bytes: int = 0
    planned_bytes: int = 0
    seconds: float = 0.0  # since the first read; stands still once all is read


@dataclass(frozen=True)
class DraftFigures:
    """What drafts bring, over all rounds since the gang's start. Rank 0's."""

    drafts_per_step: int = 0  # 0: off
    acceptance_by_position: tuple[float, ...] = ()  # share of rounds that kept each draft
    tokens_per_round: float | None = None  # None before the first round
    estimated_speedup: float | None = None  # rate of decoding over that without drafts


@dataclass(frozen=True)
class CopyFigures:
    """Copies of states of one kind on one rank, as last counted between two steps."""

    count: int
    bytes: int
    seconds: float  # on the device, of those that it is done with


@dataclass(frozen=True)
class PrefixFigures:
    """Reuse of prompt prefixes. Bytes and copies are each rank's own, all else is rank 0's."""

    queries: int = 0  # tokens looked up: hits and misses add up to them
    hits: int = 0
    misses: dict[str, int] = field(default_factory=dict)  # reason -> tokens
    hit_rate: float | None = None  # None before the first query
    evicted_pages: int = 0
    cached_pages: int = 0  # that a later prompt can find
    events: dict[str, int] = field(default_factory=dict)  # what became of states -> how often
    states: dict[str, int] = field(default_factory=dict)  # tier -> states that are kept now
    cells: dict[str, int] = field(default_factory=dict)  # tier -> states that have room
    cell_bytes: dict[str, int] = field(default_factory=dict)  # tier -> bytes of all its cells
    copies: dict[str, CopyFigures] = field(default_factory=dict)  # kind of copy -> figures


@dataclass(frozen=True)
class RankSnapshot:
    """Figures of one rank at one moment; counters only grow within one `epoch`."""

    rank: int
    epoch: int
    time_s: float
    step: int
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0  # prompt tokens computed
    generation_tokens: int = 0
    preemptions: int = 0
    draft_rounds: int = 0  # rows that verified drafts
    draft_tokens: int = 0  # drafts verified
    accepted_by_position: tuple[int, ...] = ()  # rounds that accepted the draft at each place
    pages_used: int = 0
    pages_total: int = 0
    slots_used: int = 0
    slots_total: int = 0
    step_seconds: float = 0.0  # sum over steps
    step_parts: dict[str, float] = field(default_factory=dict)  # see rank_worker.step_clock
    collective_seconds: float = 0.0
    entered: int = 0  # exchanges with its peers that it has begun: see rank_worker.comm
    busy_steps: int = 0
    weights_planned_bytes: int = 0
    weights_read_bytes: int = 0
    load_seconds: float = 0.0  # from the first read of weights to the last
    warm_step_seconds: float = 0.0  # a decode step of one row, measured before serving
    expert_tokens: int = 0  # token-expert pairs this rank computed, warm-up left out
    nonfinite_rows: int = 0
    eager_fallbacks: dict[str, int] = field(default_factory=dict)  # decode steps outside graphs
    ops: dict[str, str] = field(default_factory=dict)  # operator -> implementation
    prefill_owed_seconds: float = 0.0  # see rank_worker.pacing
    integrity_checks: int = 0  # of pages, slots and states, that passed
    recurrent_dtype: str = ""  # of recurrent states; empty where the model has none
    drafts: DraftFigures = DraftFigures()
    prefix_cache: PrefixFigures = field(default_factory=PrefixFigures)
    memory_bytes: dict[str, int] = field(default_factory=dict)  # ledger row -> measured bytes
    cpus: tuple[int, ...] = ()  # processors that its step loop may run on; empty: not known

    @property
    def accepted_tokens(self) -> int:
        """Drafts that equalled the model's own sample, those behind an answer's end too."""
        return sum(self.accepted_by_position)
