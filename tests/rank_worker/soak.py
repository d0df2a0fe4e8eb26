"""Mixed traffic on the real engine for as long as one likes; every answer is checked.

`python -m tests.rank_worker.soak --minutes 20 --seed 1`: a gang with prefix cache and drafts, in
which pages and states are short, beside a plain engine that computes each answer alone. Answers may
differ from where the plain engine's two best tokens are nearly equal; such places are counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch

from ops.reference.sampling import sample_local
from placement.config import EngineConfig
from rank_worker.launch import Engine, launch_engine
from rank_worker.messages import EngineRequest, FinishReason, SamplingParams, TokenBatch
from rank_worker.state_store import Verb
from tests.rank_worker.traffic import Lengths, Traffic

MODEL = Path(__file__).parents[2] / "deploy" / "models" / "tiny-flash-next"
VOCAB = 4000  # ids below the special ones
CONTEXT, POOL_TOKENS, PAGE = 1792, 2048, 16
LENGTHS = Lengths(prompt=(2, 1500), tail=(0, 60), answer=(1, 120), context=CONTEXT - 120)
MOST_OPEN = 6
TIE = 2e-4  # of a logit; a margin below it is noise
MOST_TIES = 1 / 2000  # of all tokens
SILENCE_S = 300.0
REPORT_S = 30.0


def plain_config() -> EngineConfig:
    return EngineConfig(
        str(MODEL), context_tokens=CONTEXT, kv_pool_tokens=CONTEXT, page_tokens=PAGE,
        max_sequences=1, step_timeout_s=SILENCE_S,
    )  # fmt: skip


def short_config(ranks: int, cell_bytes: int) -> EngineConfig:
    """Three states on the device, four on the host, pages for little more than one context."""
    return replace(
        plain_config(), ranks=ranks, kv_pool_tokens=POOL_TOKENS, max_sequences=4, step_tokens=256,
        mtp=2, mtp_auto=False, prefix_cache=True, prefix_bytes=3 * cell_bytes,
        prefix_host_bytes=4 * cell_bytes, prefix_interval_tokens=128, check_interval_steps=1,
    )  # fmt: skip


class LongTail(Traffic):
    """Prompts of every order of magnitude, more of the long ones."""

    def prompt_length(self) -> int:
        least, most = self.lengths.prompt
        return int(least * (most / least) ** self.random.random() ** 0.5)


@dataclass(frozen=True)
class Expected:
    ids: tuple[int, ...]
    reason: FinishReason


class Oracle:
    """The plain engine: one request at a time, neither cache nor drafts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: dict[EngineRequest, Expected] = {}

    def expected(self, request: EngineRequest) -> Expected:
        key = replace(request, request_id="plain", priority=0)
        if key not in self.known:
            (result,) = self.engine.generate([key])
            assert result.error is None, result.error
            self.known[key] = Expected(result.token_ids, result.finish_reason)
        return self.known[key]

    def margin(self, request: EngineRequest, made: tuple[int, ...]) -> float:
        """By how much, in logits, the token after `made` wins."""
        runner = self.engine.rank0.runner
        assert runner is not None
        runner.logits_log = log = []
        tokens = (*request.prompt_ids, *made)
        self.engine.generate(
            [replace(request, request_id="margin", prompt_ids=tokens, max_tokens=1)]
        )
        runner.logits_log = None
        logits, p = log[-1][-1:].float(), request.sampling
        at = [torch.tensor([value]) for value in (p.seed, p.choice, len(tokens))]
        best, scores = torch.tensor([p.temperature]), []
        for _ in range(2):
            score, token = sample_local(logits, best, *at, 0)
            scores.append(float(score))
            logits = logits.index_fill(1, token, float("-inf"))
        return (scores[0] - scores[1]) * (p.temperature or 1.0)


class Soak:
    """Keeps requests open on `engine` and compares what comes of them with the oracle's."""

    def __init__(self, engine: Engine, oracle: Oracle, seed: int) -> None:
        self.engine, self.oracle, self.random = engine, oracle, Random(seed)
        self.traffic = LongTail(self.random, VOCAB, LENGTHS)
        self.open: dict[str, EngineRequest] = {}
        self.made: dict[str, list[int]] = {}
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.heard_s = time.monotonic()

    def run(self, seconds: float) -> None:
        """Until the time is over, then to the end of what is open."""
        end = time.monotonic() + seconds
        report_s = time.monotonic() + REPORT_S
        while time.monotonic() < end or self.open:
            if time.monotonic() < end:
                self.disturb()
            self.listen()
            if time.monotonic() > report_s:
                report_s += REPORT_S
                print(self.line(), flush=True)

    def disturb(self) -> None:
        most = self.random.randint(1, MOST_OPEN)
        while len(self.open) < most:
            self.add(self.request())
        if self.random.random() < 0.03 and self.open:
            name = self.random.choice(list(self.open))
            self.engine.rank0.abort([name])
            self.check_beginning(self.open.pop(name), tuple(self.made.pop(name)))
            self.counts["cancelled"] += 1

    def request(self) -> EngineRequest:
        sampling = SamplingParams()
        if self.random.random() < 0.4:
            sampling = SamplingParams(temperature=0.8, seed=self.random.randrange(2**63))
        return self.traffic.draw(
            sampling=sampling, ignore_eos=True, priority=self.random.choice([0, 0, 0, 1, -1])
        )

    def add(self, request: EngineRequest) -> None:
        self.counts["requests"] += 1
        self.open[request.request_id] = request
        self.made[request.request_id] = []
        self.engine.rank0.submit([request])

    def listen(self) -> None:
        batches = self.engine.rank0.poll_outputs(0.2)
        if batches:
            self.heard_s = time.monotonic()
        else:
            self.engine._raise_failure()
            assert time.monotonic() - self.heard_s < SILENCE_S, "the engine is silent"
        for batch in batches:
            if batch.request_id in self.open:
                self.take(batch)

    def take(self, batch: TokenBatch) -> None:
        name = batch.request_id
        self.made[name] += batch.token_ids
        if batch.finish_reason is None:
            return
        request, made = self.open.pop(name), tuple(self.made.pop(name))
        self.counts["finished"] += 1
        self.counts["sampled"] += request.sampling.temperature > 0
        self.counts["with a hit"] += batch.cached_tokens > 0
        self.counts["accepted drafts"] += batch.accepted_tokens
        self.traffic.heard((*request.prompt_ids, *made))
        if self.check_beginning(request, made):
            expected = self.oracle.expected(request)
            if (len(made), batch.finish_reason) != (len(expected.ids), expected.reason):
                self.fault(request, f"ended by {batch.finish_reason} after {len(made)} tokens")

    def check_beginning(self, request: EngineRequest, made: tuple[int, ...]) -> bool:
        """True when `made` is what the oracle makes, as far as it goes."""
        right = self.oracle.expected(request).ids
        self.counts["tokens"] += len(made)
        for at, (got, wanted) in enumerate(zip(made, right, strict=False)):
            if got != wanted:
                margin = self.oracle.margin(request, made[:at])
                if margin < TIE:
                    self.counts["near ties"] += 1
                    print(
                        f"near tie: {request.request_id} at {at}, margin {margin:.2e}", flush=True
                    )
                else:
                    self.fault(request, f"token {at} is {got}, not {wanted}; margin {margin:.2e}")
                return False
        return True

    def fault(self, request: EngineRequest, what: str) -> None:
        text = (
            f"{request.request_id} ({len(request.prompt_ids)} tokens, {request.sampling}): {what}"
        )
        self.faults.append(text)
        print(f"MISMATCH {text}", flush=True)

    def figures(self) -> dict[str, int]:
        """What has happened so far."""
        scheduler, runner = self.engine.rank0.scheduler, self.engine.rank0.runner
        assert scheduler is not None
        assert runner is not None
        cache = scheduler.cache
        return {
            **self.counts,
            "forks": self.traffic.num_forks,
            "extensions": self.traffic.num_extensions,
            "hit tokens": cache.counts.hits,
            "looked up tokens": cache.counts.queries,
            "evicted pages": cache.counts.evicted_pages,
            "dropped states": cache.cells.counts.drops,
            **{f"{verb} copies": runner.store.ledger(verb).count for verb in Verb},
            "preemptions": scheduler.num_preemptions,
            "steps": scheduler.step,
            "mismatches": len(self.faults),
        }

    def line(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self.figures().items())

    def check(self) -> None:
        """AssertionError when an answer was wrong, or something is left of the requests."""
        scheduler = self.engine.rank0.scheduler
        assert scheduler is not None
        deadline = time.monotonic() + 30.0
        while scheduler.has_work and time.monotonic() < deadline:  # cancelled ones end last
            time.sleep(0.1)
        scheduler.check_integrity()
        assert not scheduler.has_work
        assert scheduler.cache.num_available == scheduler.limits.num_pages, "a page was lost"
        assert not self.faults, self.faults
        ties, tokens = self.counts["near ties"], self.counts["tokens"]
        assert ties <= max(1, MOST_TIES * tokens), f"{ties} near ties in {tokens} tokens"


def soak(seconds: float, seed: int, ranks: int) -> Soak:
    """A checked soak; its figures tell what has happened."""
    with launch_engine(plain_config()) as plain:
        assert plain.rank0.runner is not None
        config = short_config(ranks, plain.rank0.runner.store.cell_bytes())
        with launch_engine(config) as engine:
            one = Soak(engine, Oracle(plain), seed)
            one.run(seconds)
            print(one.line(), flush=True)
            one.check()
            return one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    try:
        soak(60 * options.minutes, options.seed, options.ranks)
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    print("every answer was right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
