"""What a run writes down: its header, then sessions, answers, failures and counters.

Owns the lines' fields and their JSON. A line is one JSON object with its `kind`. Times are Unix
seconds; `_s` durations are seconds. Knows nothing of files.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from placement.errors import ConfigError

SCHEMA = 1


@dataclass(frozen=True)
class Header:
    """What every answer of a run has in common. A run resumes under an equal header only.

    `server_revision` is the code that answered; the code that asks is named by the hashes and the
    extractor's version. Sampling values of None are left to the server's own defaults.
    """

    run_id: str
    created_at: float
    dataset_sha256: str
    questions: int  # asked, from the first row on
    preset: str
    preset_sha256: str
    extractor: int
    model: str
    plan_id: str  # "" of servers that tell none, like the next
    server_revision: str
    seed: int
    max_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    schema: int = SCHEMA

    def differences(self, other: Header) -> list[str]:
        """Settings in which two runs differ, as `name mine -> other's`. Their names don't count."""
        names = [one.name for one in fields(self) if one.name not in ("run_id", "created_at")]
        moved = [name for name in names if getattr(self, name) != getattr(other, name)]
        if "preset" in moved and "preset_sha256" in moved:
            moved.remove("preset_sha256")  # says the same
        return [f"{name} {self._short(name)} -> {other._short(name)}" for name in moved]

    def _short(self, name: str) -> str:
        value = str(getattr(self, name))
        return value[:12] if name.endswith("sha256") else value


@dataclass(frozen=True)
class Session:
    """A process begins to work on the run; its answers follow."""

    started_at: float
    base_url: str
    concurrency: int
    client_revision: str
    config_hash: str  # of the server


@dataclass(frozen=True)
class Answer:
    """A complete answer to one question. `reasoning` and `text` may quote the question."""

    id: str
    question_sha256: str
    domain: str
    order: str
    key: str
    prompt_sha256: str
    attempts: int
    started_at: float  # of the attempt that succeeded
    ended_at: float
    waited_s: float  # before it, for a server that was busy or away
    held_s: float  # the part of that in which the server said that it was held
    ttft_s: float
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    accepted_tokens: int  # drafts, like the next
    rejected_tokens: int
    finish_reason: str
    response_id: str
    strict: str | None
    robust: str | None
    reasoning: str = field(repr=False)
    text: str = field(repr=False)

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Failure:
    """A question without an answer after all attempts; asked again when the run resumes."""

    id: str
    question_sha256: str
    domain: str
    ended_at: float
    attempts: int
    reason: str  # what is printed: no text of a server, which may quote the prompt
    detail: str = field(repr=False)


@dataclass(frozen=True)
class Counters:
    """The server's own sums at a time. What it doesn't export is None."""

    at: float
    draft_tokens: float | None
    accepted_tokens: float | None
    eager_fallbacks: float | None
    held_s: float | None


@dataclass(frozen=True)
class End:
    """A run ended in order, or what resumed it did: done, failed or interrupted."""

    at: float
    how: str


Record = Session | Answer | Failure | Counters | End
_KINDS: dict[str, type[Header | Session | Answer | Failure | Counters | End]] = {
    "header": Header,
    "session": Session,
    "answer": Answer,
    "failure": Failure,
    "counters": Counters,
    "end": End,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_line(record: Header | Record) -> bytes:
    value = {"kind": _NAMES[type(record)], **asdict(record)}
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def from_line(line: bytes) -> Header | Record:
    """ConfigError for anything that `to_line` doesn't write."""
    try:
        value: dict[str, Any] = json.loads(line)
        return _KINDS[value.pop("kind")](**value)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError("no record of this version of nrank") from None
