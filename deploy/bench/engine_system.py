"""The engine as a system of `nrank bench`: it runs workloads, and prompts beside a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from deploy.bench.steps import StepTimes
from deploy.bench.workloads import Run, StreamRun, StreamWorkload, Workload
from deploy.chip_guard import guard_of
from placement.config import EngineConfig
from placement.errors import NrankError, RankError
from rank_worker.launch import POLL_S, Engine, GenerationResult
from rank_worker.messages import EngineRequest, TokenBatch


@dataclass(frozen=True)
class EngineSystem:
    """One gang. Requests of a workload go in together; times are those of its token batches."""

    engine: StreamingEngine
    name: str = "nrank"

    @classmethod
    def start(cls, stack: ExitStack, config: EngineConfig, name: str = "nrank") -> EngineSystem:
        """Runs until `stack` closes. NrankError when the gang can't start."""
        engine = StreamingEngine(config)
        stack.enter_context(guard_of(config)(engine))
        stack.callback(engine.close)
        engine.start()
        return cls(engine, name)

    @property
    def ranks(self) -> int:
        return self.engine.config.ranks

    def run(self, workload: Workload) -> Run:
        requests = [
            EngineRequest(
                f"{workload.id}-{index}",
                ids,
                workload.max_tokens,
                stop_token_ids=workload.end_token_ids,
                ignore_eos=not workload.end_token_ids,
            )
            for index, ids in enumerate(workload.prompts)
        ]
        groups = [[request] for request in requests] if workload.in_turn else [requests]
        before = self.engine.rank0.snapshot()
        answered = [self._answer(workload.id, group) for group in groups]
        steps = StepTimes.between(before, self.engine.rank0.snapshot())
        results = [result for group in answered for result in group]
        return Run(
            tuple(result.token_ids for result in results),
            max(result.ttft_s for result in results),
            sum(map(_decode_s, answered)),
            sum(result.cached_tokens for result in results),
            sum(result.draft_tokens for result in results),
            sum(result.accepted_tokens for result in results),
            steps,
        )

    def run_beside(self, workload: StreamWorkload) -> StreamRun:
        """NrankError when the stream ended before the prompt was computed."""
        return self.engine.run_beside(workload)

    def _answer(
        self, workload_id: str, requests: Sequence[EngineRequest]
    ) -> list[GenerationResult]:
        results = self.engine.generate(requests)
        for result in results:
            if result.error:
                raise RankError(f"{workload_id}: {result.error}")
        return results


def _decode_s(results: Sequence[GenerationResult]) -> float:
    return max(r.last_token_s for r in results) - min(r.ttft_s for r in results)


class StreamingEngine(Engine):
    """An Engine whose requests may arrive while others run."""

    def run_beside(self, workload: StreamWorkload) -> StreamRun:
        """See StreamRun; the stream is aborted once it has been measured."""
        name = workload.id
        stream = EngineRequest(f"{name}-0", workload.stream, workload.max_tokens, ignore_eos=True)
        prompt = EngineRequest(f"{name}-1", workload.prompt, 1, ignore_eos=True)
        record = StreamRecord(workload)
        self.rank0.submit([stream])
        for batch in self._batches(num_open=2):
            if batch.error_message:
                raise RankError(f"{name}: {batch.error_message}")
            if batch.request_id == prompt.request_id:
                record.answered(batch)
            else:
                record.add(batch)
            if record.wants_prompt:
                record.submitted_s = time.time()
                self.rank0.submit([prompt])
            if record.is_whole:
                break
        self._abort(stream)
        return record.run()

    def _abort(self, request: EngineRequest) -> None:
        """Ends a request that alone still runs, and drops what it has made since."""
        self.rank0.abort([request.request_id])
        while self.rank0.snapshot().running:
            self._raise_failure()
            self.rank0.poll_outputs(POLL_S)
        self.rank0.poll_outputs(0)


@dataclass
class StreamRecord:
    """When the tokens of a stream came, before, beside and after a prompt's prefill."""

    workload: StreamWorkload
    submitted_s: float = 0.0  # of the prompt; 0: not yet
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each token
    num_before: int = 0  # tokens when the prompt was submitted
    prompt_token_ids: tuple[int, ...] = ()
    answered_s: float = 0.0  # when the prompt's first token came; 0: not yet

    def add(self, batch: TokenBatch) -> None:
        """Takes a batch of the stream."""
        self.token_ids += batch.token_ids
        self.times += [batch.time_s] * len(batch.token_ids)
        if not self.submitted_s:
            self.num_before = len(self.times)
        if batch.finish_reason and not self.answered_s:
            raise NrankError(
                f"{self.workload.id}: the stream ended after {len(self.times)} tokens, before a "
                f"prompt of {len(self.workload.prompt)} was computed beside it"
            )

    def answered(self, batch: TokenBatch) -> None:
        """Takes the prompt's only batch."""
        self.prompt_token_ids, self.answered_s = batch.token_ids, batch.time_s

    @property
    def wants_prompt(self) -> bool:
        return not self.submitted_s and len(self.times) > self.workload.alone_tokens

    @property
    def num_beside(self) -> int:
        return self._num_until_answer - self.num_before

    @property
    def num_after(self) -> int:
        return len(self.times) - self._num_until_answer

    @property
    def _num_until_answer(self) -> int:
        return sum(moment <= self.answered_s for moment in self.times)

    @property
    def is_whole(self) -> bool:
        return bool(self.answered_s) and self.num_after >= self.workload.alone_tokens

    def run(self) -> StreamRun:
        """Rates of a whole record; the window beside the prompt begins with the last token before
        its submission and ends with its answer.
        """
        began = self.times[self.num_before - 1]
        alone_s = began - self.times[0] + self.times[-1] - self.answered_s
        num_first = sum(moment == self.times[0] for moment in self.times)
        num_alone = self.num_before - num_first + self.num_after
        return StreamRun(
            (tuple(self.token_ids), self.prompt_token_ids),
            num_alone / alone_s,
            self.num_beside / (self.answered_s - began),
            self.answered_s - self.submitted_s,
        )
