"""A sequence: one admitted request and how far it has been computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from rank_worker.draft_gain import DraftGain
from rank_worker.messages import EngineRequest, FinishReason, TokenLogprob
from rank_worker.prefix_tree import Node


@dataclass(eq=False)
class Sequence:
    """`tokens` = prompt + generated; `num_computed` of them have their state and KV in place."""

    request: EngineRequest
    tokens: list[int]
    order: tuple[int, int] = (0, 0)  # priority, then arrival: the least goes first
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)  # its first pages as the prefix cache has them
    num_hit: int = 0  # tokens that were found at the last admission
    boundaries: list[int] = field(default_factory=list)  # pages after which its state is kept
    next_save: int = 0  # tokens after which its state is kept next; 0: nowhere
    cached_tokens: int = 0  # prompt tokens that were found when it was first admitted
    num_computed: int = 0
    last_on_device: bool = False  # tokens[-1] was sampled into this slot
    preemptions: int = 0
    is_drafting: bool = False  # its tokens enter the draft head
    has_drafts: bool = False  # its slot holds drafts of the tokens that follow
    draft_tokens: int = 0  # verified so far
    accepted_tokens: int = 0  # of them part of the answer
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    scores_told: bool = False
    gain: DraftGain = field(default_factory=DraftGain)

    @classmethod
    def of(cls, request: EngineRequest, arrival: int = 0, is_drafting: bool = False) -> Sequence:
        tokens, order = list(request.prompt_ids), (request.priority, arrival)
        return cls(request=request, tokens=tokens, order=order, is_drafting=is_drafting)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens that are known and not computed yet."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decode(self) -> bool:
        return self.num_pending == 1 and self.last_on_device

    @property
    def wants_scores(self) -> bool:
        """True while prompt tokens lack their log-probability."""
        return self.request.prompt_logprobs and len(self.prompt_logprobs) < self.num_prompt - 1

    def add_scores(self, start: int, scores: list[TokenLogprob]) -> None:
        """Those of the prompt tokens from `start + 1` on; a resumed prompt is scored again."""
        del self.prompt_logprobs[start:]
        self.prompt_logprobs += scores[: self.num_prompt - 1 - start]

    def take_scores(self) -> tuple[TokenLogprob, ...]:
        """All scores of the prompt, with the first token of the answer."""
        if self.scores_told:
            return ()
        self.scores_told = True
        return tuple(self.prompt_logprobs)

    def room(self, count: int) -> int:
        """`count` tokens, or as many as are left before the state has to be kept."""
        left = self.next_save - self.num_computed
        return min(count, left) if left > 0 else count

    def tokens_left(self, context_tokens: int) -> int:
        """Tokens that the sequence may still get, the next one with them."""
        return min(self.request.max_tokens - self.num_generated, context_tokens - len(self.tokens))

    def finish_after(self, token: int, max_context: int) -> FinishReason | None:
        """Why the sequence ends with `token` as its newest one, or None."""
        if not self.request.ignore_eos and token in self.request.stop_token_ids:
            return FinishReason.STOP
        if self.num_generated >= self.request.max_tokens or len(self.tokens) >= max_context:
            return FinishReason.LENGTH
        return None
