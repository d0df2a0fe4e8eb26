"""Token batches of one request made into OpenAI objects, whole or chunk by chunk.

Owns one choice's text (detokeniser, stop strings, reasoning split, token counts) and the shapes of
answers, chunks and usage. The whole answer is the joined chunks by construction. Knows nothing of
HTTP or of where batches come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.reasoning import Delta, ReasoningSplitter, Section
from cluster.stops import StopMatcher
from cluster.token_logprobs import (
    Entry,
    EntryQueue,
    chat_logprobs,
    prompt_entries,
    text_logprobs,
)
from cluster.tokens import Detokenizer, Vocabulary
from cluster.validate import ValidRequest
from rank_worker.messages import FinishReason, TokenBatch, TokenLogprob

_FINISHED = (FinishReason.STOP, FinishReason.LENGTH)


class EchoedPrompt:
    """The prompt as it stands before an answer; `values` of all its tokens but the first."""

    def __init__(self, token_ids: Sequence[int], vocabulary: Vocabulary) -> None:
        self._token_ids, self._vocabulary = token_ids, vocabulary
        text = Detokenizer(vocabulary, skip_special=False)
        self.text = "".join([*map(text.push, token_ids), text.flush()])
        self.values: tuple[TokenLogprob, ...] = ()

    def entries(self) -> list[Entry]:
        return prompt_entries(self._token_ids, self.values, self._vocabulary)


class Choice:
    """One answer as it grows. After `finish_reason` is set, further batches change nothing."""

    def __init__(self, index: int, request: ValidRequest, vocabulary: Vocabulary) -> None:
        section = request.prompt_of(index).section
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stopped_by_string = False
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.reasoning_tokens = 0
        self.reasoning = ""
        self.content = ""
        self._end_ids = frozenset(request.end_token_ids)
        self._stops = StopMatcher(request.stops)
        self._splitter = ReasoningSplitter(section or Section.CONTENT)
        self._text = Detokenizer(
            vocabulary,
            skip_special=request.skip_special_tokens,
            show_think_tags=self._may_reason(),
        )
        self.vocabulary = vocabulary
        self.tells_logprobs = request.logprobs >= 0
        self.prompt: EchoedPrompt | None = None
        if request.echo:
            self.prompt = EchoedPrompt(request.prompt_of(index).token_ids, vocabulary)
        self._is_empty = request.max_tokens_of(index) == 0
        self._entries = EntryQueue()
        self._made = self._sent = 0  # characters of the answer, tags included

    def push(self, batch: TokenBatch) -> list[Delta]:
        """New text of `batch`, in order; a delta never holds reasoning and content both."""
        if self.finish_reason is not None:
            return []
        self.cached_tokens = max(self.cached_tokens, batch.cached_tokens)
        self.draft_tokens = max(self.draft_tokens, batch.draft_tokens)
        before = self.accepted_tokens
        self.accepted_tokens = max(before, batch.accepted_tokens)
        if self.prompt is not None and batch.prompt_logprobs:
            self.prompt.values = batch.prompt_logprobs
        if self._is_empty:
            self.finish_reason = FinishReason.LENGTH
            return []
        pieces = []
        for at, token_id in enumerate(batch.token_ids):
            is_hidden = self._is_hidden_end(batch, at)
            if batch.logprobs and not is_hidden:
                self._entries.add(Entry(token_id, self._made, batch.logprobs[at]))
            pieces.append(self._token(token_id, is_hidden))
            if self.stopped_by_string:  # tokens after the stop string never were
                # Of one round at most, whose accepted drafts come first.
                self.accepted_tokens = min(self.accepted_tokens, before + at + 1)
                break
        if self.stopped_by_string or batch.finish_reason in _FINISHED:
            pieces.append(self._end(batch))
        deltas = _merge(pieces)
        self.reasoning += "".join(delta.reasoning for delta in deltas)
        self.content += "".join(delta.content for delta in deltas)
        return deltas

    @property
    def has_reasoning(self) -> bool:
        return self._splitter.reasoned

    def take_entries(self) -> list[Entry]:
        """Tokens with their log-probabilities that may be told now, each once."""
        is_whole = self.finish_reason is not None
        return self._entries.take(self._sent, is_whole, self.stopped_by_string)

    def _may_reason(self) -> bool:
        return self._splitter.section is not Section.CONTENT

    def _is_hidden_end(self, batch: TokenBatch, at: int) -> bool:
        """The token that ended the answer is counted but not shown."""
        is_last = at == len(batch.token_ids) - 1
        return (
            is_last
            and batch.finish_reason is FinishReason.STOP
            and batch.token_ids[at] in self._end_ids
        )

    def _token(self, token_id: int, hidden: bool) -> Delta:
        self.completion_tokens += 1
        return self._pass("" if hidden else self._text.push(token_id))

    def _pass(self, text: str) -> Delta:
        """Through the stop strings and the reasoning split, which each may hold text back."""
        may_reason = self._may_reason()
        self._made += len(text)
        shown = self._stops.push(text)
        self._sent += len(shown)
        delta = self._splitter.push(shown)
        self.stopped_by_string = self._stops.matched is not None
        if may_reason:
            self._text.show_think_tags = self._may_reason()
            if self._splitter.reasoned:
                self.reasoning_tokens = self.completion_tokens
        return delta

    def _end(self, batch: TokenBatch) -> Delta:
        """Release what is held, once; a stop string may complete only now."""
        parts = [self._pass(self._text.flush())]
        held = self._stops.flush()
        self._sent += len(held)
        parts += [self._splitter.push(held), self._splitter.flush()]
        self.finish_reason = FinishReason.STOP if self.stopped_by_string else batch.finish_reason
        return Delta(
            "".join(part.reasoning for part in parts), "".join(part.content for part in parts)
        )


def _merge(pieces: Iterable[Delta]) -> list[Delta]:
    """Join neighbours of one kind; reasoning always comes before content."""
    reasoning = ""
    content = ""
    for piece in pieces:
        reasoning += piece.reasoning
        content += piece.content
    merged = (Delta(reasoning=reasoning), Delta(content=content))
    return [delta for delta in merged if delta != Delta()]


def usage(request: ValidRequest, choices: Sequence[Choice]) -> dict[str, Any]:
    """Prompts count once however many choices they have; cached tokens are the first choice's.

    Predictions are the engine's own drafts; accepted ones behind a stop string count as rejected.
    """
    prompt_tokens = sum(len(prompt.token_ids) for prompt in request.prompts)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    accepted = sum(choice.accepted_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.cached_tokens for choice in choices[:: request.n])
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(choice.draft_tokens for choice in choices) - accepted,
        },
    }


def _chat_logprobs_of(choice: Choice) -> dict[str, Any] | None:
    """Of the tokens that were not told yet; None where nobody asked."""
    if not choice.tells_logprobs:
        return None
    return chat_logprobs(choice.take_entries(), choice.vocabulary)


def _text_logprobs_of(
    choice: Choice, prompt: bool = False, answer: bool = True
) -> dict[str, Any] | None:
    """The same for a completion, with those of an echoed prompt before them where wanted."""
    if not choice.tells_logprobs:
        return None
    echoed = choice.prompt
    base = len(echoed.text) if echoed is not None else 0
    parts = []
    if prompt and echoed is not None:
        parts.append(text_logprobs(echoed.entries(), choice.vocabulary))
    if answer:
        parts.append(text_logprobs(choice.take_entries(), choice.vocabulary, base))
    return {key: [item for part in parts for item in part[key]] for key in parts[0]}


@dataclass(frozen=True)
class ChatFormat:
    """Objects of /v1/chat/completions. Reasoning goes out under both names that clients read."""

    id: str
    model: str
    created_s: int

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        return [self._chunk(choice, {"role": "assistant", "content": ""}, None)]

    def delta(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        if delta.reasoning:
            fields = {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
        else:
            fields = {"content": delta.content}
        return self._chunk(choice, fields, _chat_logprobs_of(choice))

    def closing(self, choice: Choice) -> dict[str, Any]:
        return self._chunk(choice, {}, _chat_logprobs_of(choice), finished=True)

    def usage(self, counts: dict[str, Any]) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": counts}

    def whole(self, choices: Sequence[Choice], counts: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._head("chat.completion"),
            "choices": [self._message(choice) for choice in choices],
            "usage": counts,
        }

    def _message(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content}
        if choice.has_reasoning:
            message["reasoning"] = choice.reasoning
            message["reasoning_content"] = choice.reasoning
        return {
            "index": choice.index,
            "message": message,
            "logprobs": _chat_logprobs_of(choice),
            "finish_reason": choice.finish_reason,
        }

    def _chunk(
        self, choice: Choice, delta: dict[str, Any], logprobs: Any, finished: bool = False
    ) -> dict[str, Any]:
        entry = {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason if finished else None,
        }
        return {**self._head("chat.completion.chunk"), "choices": [entry]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}


@dataclass(frozen=True)
class TextFormat:
    """Objects of /v1/completions; whole answers and chunks have the same kind and shape."""

    id: str
    model: str
    created_s: int

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        """The prompt, where it is echoed."""
        if choice.prompt is None:
            return []
        logprobs = _text_logprobs_of(choice, prompt=True, answer=False)
        return [self._object([self._entry(choice, choice.prompt.text, None, logprobs)])]

    def delta(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        logprobs = _text_logprobs_of(choice)
        return self._object([self._entry(choice, delta.content, None, logprobs)])

    def closing(self, choice: Choice) -> dict[str, Any]:
        logprobs = _text_logprobs_of(choice)
        return self._object([self._entry(choice, "", choice.finish_reason, logprobs)])

    def usage(self, counts: dict[str, Any]) -> dict[str, Any]:
        return {**self._object([]), "usage": counts}

    def whole(self, choices: Sequence[Choice], counts: dict[str, Any]) -> dict[str, Any]:
        return {**self._object([self._whole(choice) for choice in choices]), "usage": counts}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        echoed = choice.prompt.text if choice.prompt is not None else ""
        logprobs = _text_logprobs_of(choice, prompt=True)
        return self._entry(choice, echoed + choice.content, choice.finish_reason, logprobs)

    def _entry(
        self, choice: Choice, text: str, reason: FinishReason | None, logprobs: Any
    ) -> dict[str, Any]:
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _object(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": entries,
        }


AnswerFormat = ChatFormat | TextFormat
