"""Log-probabilities of an answer's tokens in the shapes of the two OpenAI routes.

Owns which tokens may be told already: never one whose text is held back, none of a stop string.
Knows nothing of how they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.tokens import Detokenizer, Vocabulary
from rank_worker.messages import TokenLogprob

LEAST = -9999.0  # OpenAI's figure for a token that is practically impossible; JSON has no infinity


@dataclass(frozen=True)
class Entry:
    """One token. `offset`: characters of the text before its own; no value: the first of all."""

    token_id: int
    offset: int
    value: TokenLogprob | None


class EntryQueue:
    """Entries of one choice in order, until they may be sent."""

    def __init__(self) -> None:
        self._waiting: list[Entry] = []

    def add(self, entry: Entry) -> None:
        self._waiting.append(entry)

    def take(self, sent: int, is_whole: bool, is_cut: bool) -> list[Entry]:
        """Those whose text begins among the `sent` characters; all others at the end.

        Behind a stop string (`is_cut`) there are none.
        """
        ready = [entry for entry in self._waiting if entry.offset < sent]
        rest = self._waiting[len(ready) :]
        self._waiting = [] if is_whole else rest
        return ready + rest if is_whole and not is_cut else ready


def prompt_entries(
    token_ids: Sequence[int], values: Sequence[TokenLogprob], vocabulary: Vocabulary
) -> list[Entry]:
    """Entries of a prompt; `values` has one for each token but the first."""
    entries, text, offset = [], Detokenizer(vocabulary, skip_special=False), 0
    for token_id, value in zip(token_ids, [None, *values], strict=True):
        entries.append(Entry(token_id, offset, value))
        offset += len(text.push(token_id))
    return entries


def chat_logprobs(entries: Sequence[Entry], vocabulary: Vocabulary) -> dict[str, Any]:
    """`logprobs` of a chat choice: each token with its bytes and those that were likely, too."""
    content = []
    for entry in entries:
        assert entry.value is not None, "chat answers have no prompt in them"
        top = [_chat_token(token, value, vocabulary) for token, value in entry.value.top]
        told = _chat_token(entry.token_id, entry.value.logprob, vocabulary)
        content.append({**told, "top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(
    entries: Sequence[Entry], vocabulary: Vocabulary, base: int = 0
) -> dict[str, Any]:
    """`logprobs` of a completion: four lists with one item a token; offsets count from `base`."""
    return {
        "tokens": [_text_token(entry.token_id, vocabulary) for entry in entries],
        "token_logprobs": [entry.value and _finite(entry.value.logprob) for entry in entries],
        "top_logprobs": [entry.value and _top(entry, vocabulary) for entry in entries],
        "text_offset": [base + entry.offset for entry in entries],
    }


def _chat_token(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    data = _bytes(token_id, vocabulary)
    return {
        "token": data.decode("utf-8", errors="replace"),
        "logprob": _finite(logprob),
        "bytes": list(data),
    }


def _top(entry: Entry, vocabulary: Vocabulary) -> dict[str, float]:
    """The likely tokens and the one that was taken; one of equal texts stands for all."""
    assert entry.value is not None
    out: dict[str, float] = {}
    for token_id, logprob in [*entry.value.top, (entry.token_id, entry.value.logprob)]:
        out.setdefault(_text_token(token_id, vocabulary), _finite(logprob))
    return out


def _text_token(token_id: int, vocabulary: Vocabulary) -> str:
    """The token's text; bytes that are no text are spelt out, as OpenAI does."""
    data = _bytes(token_id, vocabulary)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _bytes(token_id: int, vocabulary: Vocabulary) -> bytes:
    known = 0 <= token_id < len(vocabulary)  # rows that only pad the embedding have no text
    return vocabulary.token_bytes[token_id] if known else b""


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
