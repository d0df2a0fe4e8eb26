"""Requests as people and programs send them: new prompts, conversations that go on, and forks.

Draws from a random number generator; knows neither scheduler nor engine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Any

from rank_worker.messages import EngineRequest

MEMORY = 6  # of the last ones; few, so that they meet


@dataclass(frozen=True)
class Lengths:
    """Tokens, as (least, most)."""

    prompt: tuple[int, int]
    tail: tuple[int, int]
    answer: tuple[int, int]
    context: int  # a prompt is shorter than this


class Traffic:
    """`heard` has to be told every prompt with its answer: conversations go on from there."""

    def __init__(self, random: Random, vocab: int, lengths: Lengths) -> None:
        self.random, self.vocab, self.lengths = random, vocab, lengths
        self.prompts: deque[tuple[int, ...]] = deque(maxlen=MEMORY)
        self.finished: deque[tuple[int, ...]] = deque(maxlen=MEMORY)
        self.num_requests = self.num_forks = self.num_extensions = 0

    def heard(self, conversation: tuple[int, ...]) -> None:
        self.finished.append(conversation)

    def draw(self, **options: Any) -> EngineRequest:
        kind = self.random.random()
        if kind < 0.35 and self.finished:
            return self.extension(**options)
        if kind < 0.75 and self.prompts:
            return self.fork(**options)
        return self.new(**options)

    def new(self, **options: Any) -> EngineRequest:
        return self._request(self._tokens(self.prompt_length()), options)

    def prompt_length(self) -> int:
        return self.random.randint(*self.lengths.prompt)

    def extension(self, **options: Any) -> EngineRequest:
        """The next turn of a conversation that had its answer."""
        before = self.random.choice(self.finished)
        self.num_extensions += 1
        return self._request((*before, *self._tail()), options)

    def fork(self, **options: Any) -> EngineRequest:
        """A beginning of an earlier prompt or answer, and another end; at times none."""
        before = self.random.choice([*self.prompts, *self.finished])
        cut = self.random.randint((len(before) + 1) // 2, len(before))
        self.num_forks += 1
        return self._request((*before[:cut], *self._tail()), options)

    def _tail(self) -> tuple[int, ...]:
        return self._tokens(self.random.randint(*self.lengths.tail))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.choices(range(self.vocab), k=count))

    def _request(self, prompt: tuple[int, ...], options: dict[str, Any]) -> EngineRequest:
        prompt = prompt[: self.lengths.context - 1] or (0,)
        answer = self.random.randint(*self.lengths.answer)
        self.num_requests += 1
        self.prompts.append(prompt)
        return EngineRequest(f"r{self.num_requests}", prompt, answer, **options)
