"""Four passes over gangs: needles alone, the same again, in a new gang, all sequences at once.

Owns the order of work and what makes a cell pass. Every request runs to its full length, over end
tokens, so that a certified length is one that was completed; answers are compared up to their first
end token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from deploy.certify.evidence_file import EvidenceFile
from deploy.certify.needles import Prompt
from placement.evidence import Cell, Evidence, Pass
from rank_worker.launch import GenerationResult
from rank_worker.messages import EngineRequest

GANGS = ((Pass.GRID, Pass.REUSE), (Pass.RESTART,), (Pass.FILL,))  # each is one gang's


class Gang(Protocol):
    def generate(self, requests: Sequence[EngineRequest]) -> list[GenerationResult]: ...

    def preemptions(self) -> int:
        """Since its start."""


@dataclass(frozen=True)
class Answers:
    """How ids become an answer's text. `end_token_ids` end it."""

    decode: Callable[[Sequence[int]], str]
    end_token_ids: tuple[int, ...]

    def cut(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Up to the first end token, and with it."""
        for count, token in enumerate(token_ids, 1):
            if token in self.end_token_ids:
                return tuple(token_ids[:count])
        return tuple(token_ids)


@dataclass(frozen=True)
class Pool:
    """Of pages, on each rank."""

    num_pages: int
    page_tokens: int
    keeps_prefixes: bool  # of prompts above a page

    def sequences(self, length: int) -> int:
        """Of so many tokens that it holds at a time."""
        return self.num_pages // -(-length // self.page_tokens)

    def reuses(self, prompt_tokens: int) -> bool:
        return self.keeps_prefixes and prompt_tokens > self.page_tokens


@dataclass
class Certification:
    """`run` does what the file lacks; `on_cell` hears of each finished cell."""

    file: EvidenceFile
    prompts: Mapping[int, Sequence[Prompt]]  # by length
    answers: Answers
    start_gang: Callable[[Sequence[Pass]], AbstractContextManager[Gang]]
    pool: Pool  # of each gang
    on_cell: Callable[[Evidence, Cell], None]
    _warm: Prompt | None = field(default=None, init=False)  # what the gang at work computed last

    def run(self) -> Evidence:
        """NrankError when a gang fails; cells that were finished are in the file."""
        for stages in GANGS:
            work = [(n, stage) for n in self.prompts for stage in stages if self._left(stage, n)]
            if work:
                self._warm = None
                with self.start_gang(stages) as gang:
                    for length in dict.fromkeys(n for n, _ in work):
                        self._run_length(gang, length, stages)
        return self.file.evidence

    def _run_length(self, gang: Gang, length: int, stages: Sequence[Pass]) -> None:
        if Pass.FILL in stages:
            self._fill(gang, self.prompts[length][: self.file.evidence.asked.sequences])
            return
        for prompt in self.prompts[length]:
            for stage in stages:
                if (stage, length, prompt.index) not in self.file.evidence.by_key:
                    self._alone(gang, stage, prompt)

    def _left(self, stage: Pass, length: int) -> bool:
        evidence = self.file.evidence
        return len(evidence.of(stage, length)) < len(evidence.asked.indices(stage))

    def _alone(self, gang: Gang, stage: Pass, prompt: Prompt) -> None:
        if stage is Pass.REUSE and self._warm is not prompt:
            self._generate(gang, stage, [prompt])  # its first run was another process's
        before = gang.preemptions()
        results = self._generate(gang, stage, [prompt])
        self._warm = prompt
        self._add([self._cell(stage, prompt, results, 1, gang.preemptions() - before)])

    def _fill(self, gang: Gang, prompts: Sequence[Prompt]) -> None:
        """Together, and with kept prefixes once more: then none waits for another's prompt.

        One that was cut short is run whole again, but no cell is written twice.
        """
        before = gang.preemptions()
        num_rounds = 2 if self.pool.keeps_prefixes else 1
        rounds = [self._generate(gang, Pass.FILL, prompts) for _ in range(num_rounds)]
        preemptions = gang.preemptions() - before
        # One that was preempted is still between its first and its last token.
        room = self.pool.sequences(prompts[0].length)
        at_once = min(room, max(map(most_at_once, rounds)))
        cells = [
            self._cell(Pass.FILL, prompt, results, at_once, preemptions)
            for prompt, *results in zip(prompts, *rounds, strict=True)
        ]
        self._add([cell for cell in cells if cell.key not in self.file.evidence.by_key])

    def _generate(
        self, gang: Gang, stage: Pass, prompts: Sequence[Prompt]
    ) -> list[GenerationResult]:
        requests = [
            EngineRequest(
                f"certify-{stage}-{prompt.length}-{prompt.index}",
                prompt.ids,
                prompt.answer_tokens,
                stop_token_ids=self.answers.end_token_ids,
                ignore_eos=True,
            )
            for prompt in prompts
        ]
        return gang.generate(requests)

    def _add(self, cells: Sequence[Cell]) -> None:
        self.file.add(cells)
        for cell in cells:
            self.on_cell(self.file.evidence, cell)

    def _cell(
        self,
        stage: Pass,
        prompt: Prompt,
        results: Sequence[GenerationResult],
        at_once: int,
        preemptions: int,
    ) -> Cell:
        """Of the first result, or of the first that fails."""
        expected = prompt.code
        if stage is not Pass.GRID:
            expected = self.file.evidence.by_key[Pass.GRID, prompt.length, prompt.index].got
        faults = [(self._fault(stage, prompt, result, expected), result) for result in results]
        reason, result = next((pair for pair in faults if pair[0]), faults[0])
        return Cell(
            stage=stage,
            length=prompt.length,
            index=prompt.index,
            depth=prompt.depth,
            prompt_tokens=len(prompt.ids),
            completed_tokens=len(prompt.ids) + len(result.token_ids),
            cached_tokens=result.cached_tokens,
            expected=expected,
            got=self._got(result),
            at_once=at_once,
            preemptions=preemptions,
            seconds=round(result.last_token_s, 6),
            passed=not reason,
            reason=reason,
        )

    def _got(self, result: GenerationResult) -> str:
        ids = ",".join(map(str, self.answers.cut(result.token_ids)))
        return hashlib.sha256(ids.encode()).hexdigest()[:16]

    def _fault(self, stage: Pass, prompt: Prompt, result: GenerationResult, expected: str) -> str:
        """Why it fails, or ""."""
        completed = len(prompt.ids) + len(result.token_ids)
        if result.error:
            return " ".join(result.error.split())
        if completed != prompt.length:
            return f"ended after {completed} tokens"
        if stage is Pass.GRID:
            text = self.answers.decode(self.answers.cut(result.token_ids))
            return "" if prompt.code in text else f"answered {_last_line(text)!r}"
        if self._got(result) != expected:
            return "other ids than alone in the first gang"
        is_cached = result.cached_tokens > 0
        if stage is Pass.REUSE and is_cached != self.pool.reuses(len(prompt.ids)):
            return f"{result.cached_tokens} tokens were cached"
        return ""


def most_at_once(results: Sequence[GenerationResult]) -> int:
    """Of requests submitted together: how many were between first and last token at one moment."""
    spans = [(r.ttft_s, r.last_token_s) for r in results if r.token_ids]
    return max((sum(a <= first <= b for a, b in spans) for first, _ in spans), default=0)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][-80:]
