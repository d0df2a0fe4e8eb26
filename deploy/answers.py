"""Answers of `nrank generate`: engine results as text, with stop strings, usage and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deploy.prompts import Job, ModelLimits
from rank_worker.launch import GenerationResult
from rank_worker.messages import FinishReason


@dataclass(frozen=True)
class Answer:
    """One result as printed. `text` is None where there is no tokenizer to make it with."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int
    seed: int | None
    error: str | None

    @classmethod
    def make(cls, job: Job, result: GenerationResult, limits: ModelLimits) -> Answer:
        """Cut ids and text at the first stop string; ids keep the token that completed it."""
        count, text, stopped = len(result.token_ids), None, False
        if limits.has_tokenizer:
            count, text, stopped = _visible(job, result.token_ids, limits)
        reason = FinishReason.STOP if stopped else result.finish_reason
        return cls(
            request_id=result.request_id,
            prompt_ids=job.prompt_ids,
            token_ids=result.token_ids[:count],
            text=text,
            finish_reason=reason.value,
            cached_tokens=result.cached_tokens,
            draft_tokens=result.draft_tokens,
            accepted_tokens=min(result.accepted_tokens, count),
            seed=job.seed,
            error=result.error,
        )

    def to_json(self) -> dict[str, Any]:
        prompt, completion = len(self.prompt_ids), len(self.token_ids)
        answer: dict[str, Any] = {
            "prompt_ids": list(self.prompt_ids),
            "token_ids": list(self.token_ids),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
                "completion_tokens_details": {
                    "accepted_prediction_tokens": self.accepted_tokens,
                    "rejected_prediction_tokens": self.draft_tokens - self.accepted_tokens,
                },
            },
        }
        if self.seed is not None:
            answer["seed"] = self.seed
        if self.error:
            answer["error"] = self.error
        return answer

    def printable(self) -> str:
        return ",".join(map(str, self.token_ids)) if self.text is None else self.text


def _visible(job: Job, token_ids: tuple[int, ...], limits: ModelLimits) -> tuple[int, str, bool]:
    """Tokens that count, their text without the stop string, and whether one matched."""
    from cluster.stops import StopMatcher
    from cluster.tokens import Detokenizer

    detokenizer = Detokenizer(limits.tokenizer.vocabulary, show_think_tags=True)
    matcher = StopMatcher(job.stop)
    text = ""
    for count, token in enumerate(token_ids, 1):
        text += matcher.push(detokenizer.push(token))
        if matcher.matched is not None:
            return count, text, True
    text += matcher.push(detokenizer.flush())
    stopped = matcher.matched is not None
    return len(token_ids), text + matcher.flush(), stopped
