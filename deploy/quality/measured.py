"""What an engine answers to the smoke set, and what is right in it. No comparison here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deploy.gpqa.extract import robust
from deploy.quality.smoke_set import Asking, SmokeSet
from placement.errors import NrankError
from rank_worker.messages import EngineRequest, TokenLogprob

if TYPE_CHECKING:  # a baseline is read, or refused, without torch
    from rank_worker.launch import Engine, GenerationResult

TOP = 20  # likely tokens that a baseline keeps of each scored position
TOP_ASKED = 64  # and that are asked for, so that those of a baseline are among them
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)


class SmokeFailure(NrankError):
    """A request of the smoke set that ended with an error (exit code 1)."""


@dataclass(frozen=True)
class Text:
    """Greedy ids, and by how much the best token was more likely than the next (log)."""

    ids: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True)
class Scored:
    """One position: the log-probability of the token that comes, and the most likely ones."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Answered:
    """`given` is what was read out of the answer: a letter, a call, the last line."""

    given: str
    is_right: bool


@dataclass(frozen=True)
class Measured:
    """By the order of the smoke set; `scored` holds the positions of all its texts in a row."""

    texts: tuple[Text, ...]
    tools: tuple[Answered, ...]
    choices: tuple[Answered, ...]
    needles: tuple[Answered, ...]
    scored: tuple[Scored, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """As `SmokeSet.counts`."""
        parts = (self.texts, self.tools, self.choices, self.needles, self.scored)
        return tuple(map(len, parts))

    def to_json(self) -> dict[str, Any]:
        def answered(answers: Sequence[Answered]) -> list[list[Any]]:
            return [[answer.given, answer.is_right] for answer in answers]

        return {
            "texts": [
                {"ids": list(text.ids), "margins": [round(m, 5) for m in text.margins]}
                for text in self.texts
            ],
            "tools": answered(self.tools),
            "choices": answered(self.choices),
            "needles": answered(self.needles),
            "scored": [
                [round(s.logprob, 6), [[token, round(value, 6)] for token, value in s.top[:TOP]]]
                for s in self.scored
            ],
        }

    @classmethod
    def from_json(cls, found: Any) -> Measured:
        """KeyError, TypeError or ValueError for what isn't of this form."""

        def answered(name: str) -> tuple[Answered, ...]:
            return tuple(Answered(str(given), bool(right)) for given, right in found[name])

        texts = tuple(
            Text(tuple(map(int, text["ids"])), tuple(map(float, text["margins"])))
            for text in found["texts"]
        )
        scored = tuple(
            Scored(float(own), tuple((int(token), float(value)) for token, value in top))
            for own, top in found["scored"]
        )
        if not all(position.top for position in scored):
            raise ValueError("a position has no likely tokens")
        return cls(texts, answered("tools"), answered("choices"), answered("needles"), scored)


def measure(
    engine: Engine,
    smoke: SmokeSet,
    end_token_ids: tuple[int, ...],
    decode: Callable[[Sequence[int], bool], str],
    on_part: Callable[[str], None],
) -> Measured:
    """Runs the parts one after the other, the requests of a part together.

    `decode` gives the text of ids, without special tokens or with them.
    """

    def run(part: str, askings: Sequence[Asking], **asked: Any) -> list[GenerationResult]:
        on_part(part)
        return _run(engine, askings, end_token_ids, **asked) if askings else []

    def answers(
        part: str, askings: Sequence[Asking], read: _Reader, skip_special: bool = True
    ) -> tuple[Answered, ...]:
        texts = [decode(result.token_ids, skip_special) for result in run(part, askings)]
        pairs = zip(askings, texts, strict=True)
        return tuple(read(text, asking.expected) for asking, text in pairs)

    texts = run("texts", smoke.texts, logprobs=2)
    tools = answers("tool calls", smoke.tools, read_call, skip_special=False)
    choices = answers("choice questions", smoke.choices, read_letter)
    needles = answers("needles", smoke.needles, read_code)
    scored = run("scored texts", smoke.scored, logprobs=TOP_ASKED, prompt_logprobs=True)
    return Measured(
        tuple(Text(r.token_ids, tuple(map(_margin, r.logprobs))) for r in texts),
        tools,
        choices,
        needles,
        tuple(Scored(p.logprob, p.top) for result in scored for p in result.prompt_logprobs),
    )


_Reader = Callable[[str, str], Answered]


def _run(
    engine: Engine, askings: Sequence[Asking], end_token_ids: tuple[int, ...], **asked: Any
) -> list[GenerationResult]:
    requests = [
        EngineRequest(a.name, a.ids, a.max_tokens, stop_token_ids=end_token_ids, **asked)
        for a in askings
    ]
    results = engine.generate(requests)
    for result in results:
        if result.error:
            reason = " ".join(result.error.split())
            raise SmokeFailure(f"{result.request_id} of the smoke set ended with {reason}")
    return results


def _margin(token: TokenLogprob) -> float:
    best = [value for _, value in token.top]
    return best[0] - best[1] if len(best) > 1 else float("inf")


def read_letter(text: str, expected: str) -> Answered:
    letter = robust(text) or ""
    return Answered(letter, letter == expected)


def read_code(text: str, expected: str) -> Answered:
    return Answered(text.strip().rpartition("\n")[2][-80:], expected in text)


def read_call(text: str, expected: str) -> Answered:
    """Right when there is one call, with the name and the arguments that were asked for."""
    calls = _CALL.findall(text)
    if len(calls) != 1:
        return Answered(f"{len(calls)} calls", False)
    try:
        call = json.loads(calls[0])
    except ValueError:
        return Answered("a call that is no JSON", False)
    return Answered(json.dumps(call)[:200], call == json.loads(expected))
