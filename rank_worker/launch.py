"""Runs a gang without Ray: rank 0 in this process, the others as spawned processes.

For `generate`, benchmarks, tests and machines without Ray. The parent watches its children; they
end with it however it ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.sharedctypes import RawValue
from typing import Any

from placement.config import EngineConfig
from placement.errors import NrankError, RankError
from rank_worker.affinity import pin_thread
from rank_worker.guard_word import GuardWord, Order
from rank_worker.load_progress import rank_text, slowest
from rank_worker.messages import (
    EngineRequest,
    FinishReason,
    LoadProgress,
    RankSnapshot,
    TokenBatch,
    TokenLogprob,
)
from rank_worker.rank import Rank
from rank_worker.start_report import StartReport, start_report
from rank_worker.time_limit import TimeLimit

SAFE_PATH = "PYTHONSAFEPATH"  # Python: the current directory is no place to import from
POLL_S = 0.2
PROGRESS_S = 0.25  # a rank that loads tells how far it is at this interval
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class GenerationResult:
    """What one request came to. Times are seconds since it was submitted."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int
    ttft_s: float
    last_token_s: float
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


OnProgress = Callable[[Sequence[LoadProgress]], None]
# Called with configuration, rank, world size and `word`; has to pickle.
RankMaker = Callable[..., Rank]


class _Child:
    """A spawned rank and the pipe that its progress and its last words come through."""

    def __init__(
        self, config: EngineConfig, rank: int, world_size: int, port: int, word: GuardWord,
        make_rank: RankMaker,
    ) -> None:  # fmt: skip
        context = _fork_context()
        self.rank = rank
        self.pipe, theirs = context.Pipe()
        arguments = (config, rank, world_size, port, theirs, word, make_rank)
        self.process = context.Process(target=_child_main, args=arguments, daemon=True)
        try:
            self.process.start()
        except (EOFError, OSError) as error:
            text = f"rank {rank} could not be started ({type(error).__name__}: {error})"
            raise RankError(f"{text}; see the output above", rank, phase="start") from error
        theirs.close()
        self.progress = LoadProgress(rank, "starting")
        self._snapshot: RankSnapshot | None = None
        self._error: NrankError | None = None

    def listen(self) -> None:
        """Takes all that the rank has sent."""
        try:
            while self.pipe.poll(0):
                self._take(self.pipe.recv())
        except EOFError:
            pass  # it has ended: failure() says how

    def _take(self, message: LoadProgress | RankSnapshot | NrankError) -> None:
        if isinstance(message, LoadProgress):
            self.progress = message
        elif isinstance(message, RankSnapshot):
            self._snapshot = message
        else:
            self._error = message

    def loaded(self) -> RankSnapshot:
        """The snapshot that the rank sends once it has loaded; waits for it."""
        while self._snapshot is None:
            wait([self.pipe, self.process.sentinel])
            failure = self.failure()
            if failure is not None and self._snapshot is None:
                raise failure
        return self._snapshot

    def failure(self) -> NrankError | None:
        """Why the process ended before it was told to, or None while it runs."""
        is_alive = self.process.is_alive()
        self.listen()
        if is_alive:
            return None
        if self._error is not None:
            return self._error
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
        return RankError(f"rank {self.rank} {how}; see its output above", self.rank)


def _fork_context() -> ForkServerContext:
    """Its server has torch imported and forks each rank, so more ranks start no slower.

    It is started with a safe path: a folder `ops` where the user stands is not ours.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_worker.rank"])
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before
    return context


def _child_main(
    config: EngineConfig, rank: int, world_size: int, port: int, pipe: Connection, word: GuardWord,
    make_rank: RankMaker,
) -> None:  # fmt: skip
    _end_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if config.pin_cpus:
        pin_thread(rank, world_size)
    worker = make_rank(config, rank, world_size, word=word)
    try:
        worker.open(port)
        with _reporting(worker, pipe):
            worker.load()
        pipe.send(worker.snapshot())
        worker.run()
        pipe.send(worker.snapshot())
    except NrankError as error:
        pipe.send(error)
        os._exit(1)
    finally:
        worker.close()


@contextmanager
def _reporting(worker: Rank, pipe: Connection) -> Iterator[None]:
    """While inside, the pipe is a thread's that tells the launcher how far the rank has loaded."""
    done = threading.Event()

    def report() -> None:
        try:
            while not done.wait(PROGRESS_S):
                pipe.send(worker.progress())
        except OSError:
            return  # the launcher is gone, and this process ends with it

    thread = threading.Thread(target=report, name="load-report", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _end_with_launcher() -> None:
    """Ends this rank when the launching process is gone, also while it waits in a collective.

    Not by a parent-death signal: the parent is the fork server, which outlives the launcher for
    as long as a rank lives.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


class Engine:
    """A running gang. `generate` takes requests and returns when all of them ended."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: OnProgress | None = None,
        make_rank: RankMaker = Rank,
    ) -> None:
        self.config, self._make_rank = config, make_rank
        self.on_progress = on_progress
        self.word = GuardWord(RawValue(ctypes.c_byte, Order.RUN))
        self.rank0 = make_rank(config, 0, config.ranks, word=self.word)
        self.snapshots: list[RankSnapshot] = []
        self._children: list[_Child] = []
        self._thread = threading.Thread(target=self._lead, name="rank-0", daemon=True)
        self._loaded = threading.Event()
        self._error: BaseException | None = None
        self._port = 0
        self._times: dict[str, Any] = {}

    def start(self) -> None:
        """Spawns, loads and warms up all ranks; raises the first rank's error."""
        world_size = self.config.ranks
        if world_size > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            self._port = self.rank0.listen()
            self._children = [
                _Child(self.config, rank, world_size, self._port, self.word, self._make_rank)
                for rank in range(1, world_size)
            ]
        self._thread.start()
        self._wait_loaded()
        self.snapshots = [self.rank0.snapshot(), *(child.loaded() for child in self._children)]

    def _wait_loaded(self) -> None:
        """Until rank 0 has loaded, which it has when all have. Rank 0 itself limits the meeting."""
        limit: TimeLimit | None = None
        while not self._loaded.wait(POLL_S):
            self._raise_failure()
            ranks = [self.rank0.progress(), *(child.progress for child in self._children)]
            if self.on_progress is not None:
                self.on_progress(ranks)
            if limit is None and ranks[0].phase == "loading":
                limit = TimeLimit(self.config.load_timeout_s, lambda: self.word.order.slows_loads)
            if limit is not None and limit.left_s() <= 0:
                raise _late(ranks, self.config.load_timeout_s)

    def _lead(self) -> None:
        try:
            if self.config.pin_cpus:
                pin_thread(0, self.config.ranks)
            self.rank0.open(self._port)
            self.rank0.load()
            self._loaded.set()
            self.rank0.run()
        except BaseException as error:  # handed to the caller's thread, which raises it
            self._error = error
        finally:
            self.rank0.close()

    def _raise_failure(self) -> None:
        for child in self._children:
            child.listen()
        dead = [c for c in self._children if not c.process.is_alive()]
        if self._error is not None and not dead:
            wait([c.process.sentinel for c in self._children], timeout=1.0)
            dead = [c for c in self._children if not c.process.is_alive()]
        for child in dead:
            failure = child.failure()
            if failure is not None:
                raise failure
        if self._error is not None:
            raise self._error

    def generate(self, requests: Sequence[EngineRequest]) -> list[GenerationResult]:
        """Runs all requests concurrently; results in the order of `requests`."""
        records = {r.request_id: _Record(r) for r in requests}
        self.rank0.submit(requests)
        for batch in self._batches(len(requests)):
            records[batch.request_id].add(batch)
        results = [records[r.request_id].result() for r in requests]
        self._times = _rates(results, requests)
        return results

    def _batches(self, num_open: int) -> Iterator[TokenBatch]:
        while num_open:
            batches = self.rank0.poll_outputs(POLL_S)
            if not batches:
                self._raise_failure()
            for batch in batches:
                num_open -= batch.finish_reason is not None
                yield batch

    def stats(self) -> dict[str, Any]:
        """Rates of the last `generate`, bytes each rank read, routes to each expert so far, and
        what was planned beside what was measured after the start.
        """
        return {
            **self._times,
            "bytes_read": [s.weights_read_bytes for s in self.snapshots],
            "bytes_planned": [s.weights_planned_bytes for s in self.snapshots],
            "start": asdict(self.start_report()),
            "expert_counts": self.rank0.expert_counts(),
        }

    def start_report(self) -> StartReport:
        assert self.rank0.plan is not None, "start() comes first"
        return start_report(self.rank0.plan, self.snapshots)

    def close(self) -> None:
        """Stops the loops, then ends whatever did not stop in time.

        Rank 0's thread has ended before this returns: the interpreter can't end while a thread is
        inside a collective or a read ("terminate called without an active exception").
        """
        self.rank0.stop()
        if self._error is None and self._loaded.is_set():
            self._thread.join(STOP_TIMEOUT_S)
            for child in self._children:
                child.process.join(STOP_TIMEOUT_S)
        for child in self._children:
            if child.process.is_alive():
                child.process.kill()
            child.process.join(STOP_TIMEOUT_S)
            child.pipe.close()
        if self._thread.ident is not None:  # it was started
            self._thread.join(STOP_TIMEOUT_S)


def _late(ranks: Sequence[LoadProgress], timeout_s: float) -> RankError:
    late = slowest(ranks)
    if late is None:
        return RankError(
            f"all weights are read, but no step was made: load_timeout_s={timeout_s:g}"
        )
    text = f"not loaded within load_timeout_s={timeout_s:g}; slowest is {rank_text(late)}"
    return RankError(text, rank=late.rank, phase="load")


class _Record:
    """Collects one request's batches."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.submitted_s = time.time()
        self.first_s = self.last_s = 0.0
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.last: TokenBatch | None = None

    def add(self, batch: TokenBatch) -> None:
        if batch.token_ids and not self.token_ids:
            self.first_s = batch.time_s
        self.last_s = batch.time_s
        self.token_ids += batch.token_ids
        self.logprobs += batch.logprobs
        self.prompt_logprobs += batch.prompt_logprobs
        self.last = batch

    def result(self) -> GenerationResult:
        last = self.last
        assert last is not None
        assert last.finish_reason is not None
        return GenerationResult(
            self.request.request_id, tuple(self.token_ids), last.finish_reason,
            len(self.request.prompt_ids), last.cached_tokens, last.draft_tokens,
            last.accepted_tokens, max(0.0, self.first_s - self.submitted_s),
            self.last_s - self.submitted_s, last.error_message,
            tuple(self.logprobs), self.prompt_logprobs,
        )  # fmt: skip


def _rates(
    results: Sequence[GenerationResult], requests: Sequence[EngineRequest]
) -> dict[str, Any]:
    """Decode rate = tokens after the first ones over the time in which they were made."""
    first = min(r.ttft_s for r in results)
    last_first = max(r.ttft_s for r in results)
    end = max(r.last_token_s for r in results)
    decoded = sum(max(0, len(r.token_ids) - 1) for r in results)
    prompt = sum(len(r.prompt_ids) for r in requests)
    return {
        "decode_tokens_per_s": decoded / (end - first) if end > first else 0.0,
        "prefill_tokens_per_s": prompt / last_first if last_first > 0 else 0.0,
        "ttft_s": first,
        "draft_tokens": sum(r.draft_tokens for r in results),
        "accepted_tokens": sum(r.accepted_tokens for r in results),
        "cached_tokens": sum(r.cached_tokens for r in results),
    }


@contextmanager
def launch_engine(
    config: EngineConfig,
    on_progress: OnProgress | None = None,
    guard: Callable[[Engine], AbstractContextManager[object]] = nullcontext,
    make_rank: RankMaker = Rank,
) -> Iterator[Engine]:
    """A started Engine, closed at the end. NrankError when it can't start.

    `on_progress` is called about five times a second while weights are loaded. `guard` is entered
    before the start. `make_rank` makes the ranks, for who has to listen in.
    """
    engine = Engine(config, on_progress, make_rank)
    with guard(engine):
        try:
            engine.start()
            yield engine
        finally:
            engine.close()
