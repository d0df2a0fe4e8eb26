"""One rank of a gang: opens its groups, loads its share, and runs the step loop.

Rank 0 leads: it owns the scheduler and sends every step's plan; the others execute what they
receive. Only the thread that calls `run` touches the device; the other methods are thread-safe.
Knows nothing of Ray or HTTP.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ops.capability_file import with_results
from ops.registry import OpSet
from placement.config import EngineConfig
from placement.errors import NrankError, RankError
from placement.ledger import loaded_scales, loaded_tensors
from placement.plan import Plan
from placement.prepare import prepare
from placement.reads import plan_reads
from placement.spec import Axis
from rank_worker.affinity import cpus_of
from rank_worker.comm import Comm, LocalComm, make_comm
from rank_worker.cool_reads import CoolReads
from rank_worker.device import Device, open_device
from rank_worker.guard_word import GuardWord, Order
from rank_worker.loader import LoadCounter, Loader
from rank_worker.messages import (
    CopyFigures,
    EngineRequest,
    LoadProgress,
    PrefixFigures,
    RankSnapshot,
    TokenBatch,
)
from rank_worker.model import parameter_dtype
from rank_worker.op_probe import sizes_of
from rank_worker.packed_weights import PackedReader
from rank_worker.parts import Parts
from rank_worker.rank_figures import (
    copy_figures,
    draft_figures,
    eager_fallbacks,
    op_implementations,
    prefix_figures,
    recurrent_dtype,
    step_parts,
)
from rank_worker.runner import Runner
from rank_worker.scheduler import Scheduler, SchedulerLimits
from rank_worker.slot_names import SlotNames
from rank_worker.stated_shapes import check_stated_shapes
from rank_worker.step_error import step_error
from rank_worker.step_logprobs import StepLogprobs
from rank_worker.step_plan import Admit, Opcode, PageUpdate, Row, RowFlag, StepPlan, decode, encode
from rank_worker.time_limit import TimeLimit
from rank_worker.weights import WeightSource

COUNTER_INTERVAL_S = 2.0
WARM_REPEATS = 5  # of warm-up steps that are compared with each other
HEARTBEAT_S = 1.0  # an idle rank 0 tells the others at this interval that it lives


class Rank:
    """Life cycle: listen (rank 0) -> open -> load -> run until stop -> close."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        world_size: int,
        epoch: int = 0,
        word: GuardWord | None = None,
    ) -> None:
        """`word` may be shared with the other ranks of a machine: who gives orders has it, too."""
        self.config, self.rank, self.world_size, self.epoch = config, rank, world_size, epoch
        self.comm: Comm = LocalComm()
        self.counter = LoadCounter()
        self.plan: Plan | None = None
        self._store: Any = None  # rank 0: the rendezvous store it serves
        self.runner: Runner | None = None
        self.scheduler: Scheduler | None = None
        self._inbox: queue.SimpleQueue[EngineRequest | tuple[str, ...]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[list[TokenBatch]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.word = word or GuardWord()
        reads = CoolReads(self.word, self._stop.is_set)
        self.pace: Callable[[int], None] | None = reads.before_read  # see Loader
        self._device: Device | None = None
        self._phase = "starting"
        self._step = 0
        self._busy_steps = 0
        self._step_seconds = 0.0
        self._nonfinite_rows = 0
        self._integrity_checks = 0
        self._names = SlotNames()
        self._weight_bytes: dict[str, int] = {}
        self._warm_step_seconds = 0.0
        self._expert_counts: list[list[int]] = []
        self._copies: dict[str, CopyFigures] = {}
        self._counters_read_s = 0.0
        self._thread_id = 0  # of the step loop

    def listen(self) -> int:
        """Rank 0 opens the rendezvous on a free port and returns the port."""
        from rank_worker.comm_store import listen

        self._store, port = listen(self.config.master_address, self.config.start_timeout_s)
        return port

    def open(self, port: int) -> None:
        """Joins the gang's groups; RankError after `start_timeout_s`, naming who is missing."""
        self._begin()
        if self.world_size > 1:
            self.comm = make_comm(
                self.config, self.rank, self.world_size, port, self._store, self._stop.is_set
            )

    def _begin(self) -> Device:
        """Takes the chip for this thread: before a communicator, and again in each thread."""
        if self._device is None:
            self._device = open_device(self.config.device)
        self._thread_id = threading.get_native_id()
        self._device.begin(self.rank, parameter_dtype(self.config.dtype))
        return self._device

    def load(self) -> None:
        """Plans, reads the owned bytes, builds the caches and runs a warm-up step on all ranks."""
        torch.set_num_threads(1)
        self._phase = "loading"
        prepared = prepare(self.config)
        spec, self.plan = prepared.spec, prepared.plan
        plan, share = self.plan, self.plan.ranks[self.rank].share
        scales = loaded_scales(self.config, spec)
        tensors = loaded_tensors(self.config, spec) + scales
        reads = plan_reads(tensors, share, prepared.headers)
        check_stated_shapes(tensors, share, prepared.headers)
        dtype = parameter_dtype(self.config.dtype)
        loader = Loader(dtype, self.counter, self.pace)
        source = WeightSource(loader, tensors, reads, PackedReader(share, scales))
        self._weight_bytes = source.row_bytes
        device = self._begin()
        capability = device.capability(dtype)
        if self.config.ops_file:
            capability = with_results(capability, sizes_of(spec), Path(self.config.ops_file))
        ops = OpSet(capability, self.config.check_contracts)
        device.prepare(ops.op_info())
        parts = Parts(
            ops, device, spec, share, plan.replica_table,
            plan.num_pages, plan.page_tokens, plan.num_slots, self.config.int8_activations,
        )  # fmt: skip
        vocab = tuple(s.ranges[Axis.VOCAB] for s in plan.shares)
        context = plan.context.configured_tokens
        with device.building():
            self.runner = Runner(
                parts, device.weights(source), self.comm, vocab, context, self.config.mtp,
                plan.prefix.device, plan.prefix.host,
            )  # fmt: skip
        if self.rank == 0:
            self.scheduler = Scheduler(self._limits(plan))
        limit = TimeLimit(self.config.load_timeout_s, lambda: self.word.order.slows_loads)
        self.comm.roll_call("loaded", limit)
        self._warm_up()
        device.release_freed()
        self._phase = "ready"

    def _limits(self, plan: Plan) -> SchedulerLimits:
        c = self.config
        return SchedulerLimits(
            c.step_tokens, c.prefill_chunk_tokens, c.page_tokens, plan.num_pages,
            c.max_sequences, plan.context.configured_tokens, c.check_interval_steps, self.epoch,
            c.mtp, c.mtp_auto, plan.prefix.device, plan.prefix.host, c.prefix_interval_tokens,
            c.decode_share,
        )  # fmt: skip

    def _warm_up(self) -> None:
        """A prefill and a decode step through every layer and collective, on slot 0.

        With drafts a round of them, too; its rows may reach past page 0, into a table of zeros.
        """
        admit = Admit(0, 0.0, 0, 1.0, 0.0, 0, 0)
        prefill, last = RowFlag.PREFILL | RowFlag.SAMPLE, RowFlag.SAMPLE
        steps = (
            StepPlan(
                Opcode.STEP, self.epoch, 0, True, (admit,), (PageUpdate(0, 0, 0),),
                (Row(0, 0, 2, prefill),), (0, 0),
            ),
            self._warm_row(Row(0, 2, 1, last)),
        )  # fmt: skip
        for step in (*steps, *self._warm_round()):
            self._timed(step)
        self._warm_step_seconds = self._timed(steps[-1])  # once more
        if self.config.mtp:
            self._measure_drafts()
        assert self.runner is not None
        if self.config.graphs:
            self.runner.record_graphs()
        self.runner.reset_counts()
        self.comm.barrier()

    def _measure_drafts(self) -> None:
        """What a draft round costs, and what it costs a plain step to enter the draft head."""
        enter = RowFlag.SAMPLE | RowFlag.ENTER
        plain, entering = (self._warm_row(Row(0, 2, 1, f)) for f in (RowFlag.SAMPLE, enter))
        times: list[list[float]] = []
        for _ in range(WARM_REPEATS):  # in turns: what disturbs one disturbs all
            times.append([self._timed(s) for s in (plain, entering, *self._warm_round())])
        if self.scheduler is None:
            return
        cost = self.scheduler.cost
        plain_s, entering_s, *rounds_s = zip(*times, strict=True)
        cost.entering = max(1.0, min(entering_s) / min(plain_s))
        for seconds in plain_s:
            cost.saw_plain(1, seconds)
        for seconds in (s for one in rounds_s for s in one):
            cost.saw_round(1, seconds)

    def _warm_row(self, row: Row) -> StepPlan:
        return StepPlan(Opcode.STEP, self.epoch, 0, True, (), (), (row,), ())

    def _timed(self, step: StepPlan) -> float:
        """Seconds of a warm-up step."""
        assert self.runner is not None
        began = time.perf_counter()
        self.runner.execute(decode(encode(step)))
        return time.perf_counter() - began

    def _warm_round(self) -> tuple[StepPlan, ...]:
        """Slot 0 verifies drafts and makes new ones; nothing where the context is too short."""
        mtp = self.config.mtp
        assert self.plan is not None
        if not mtp or self.plan.context.configured_tokens < 2 + 2 * mtp:
            return ()
        flags = RowFlag.SAMPLE | RowFlag.DRAFT | RowFlag.ENTER | RowFlag.PROPOSE
        return (self._warm_row(Row(0, 2, 1 + mtp, flags)),)

    def run(self) -> None:
        """The step loop. Returns after `stop`; RankError when a step or a peer fails."""
        assert self.runner is not None, "load() comes before run()"
        self._begin()
        try:
            if self.rank == 0:
                self._lead(self.runner)
            else:
                self._follow(self.runner)
        except NrankError:
            raise
        except Exception as error:
            raise RankError(
                f"rank {self.rank} failed in step {self._step}: {type(error).__name__}: {error}",
                rank=self.rank, step=self._step, phase="step",
            ) from error  # fmt: skip

    def _lead(self, runner: Runner) -> None:
        scheduler, is_checked = self.scheduler, True
        assert scheduler is not None
        while not self._stop.is_set():
            self._drain_inbox(scheduler)
            is_still = self.word.order.is_still
            idle = StepPlan(Opcode.IDLE, self.epoch, scheduler.step)
            words = encode(idle if is_still else scheduler.schedule())
            plan = decode(words)  # what the others see: figures are rounded to 32 bits
            self.comm.send_plan(words)
            if plan.admits:
                self.comm.send_plan(self._names.tell(plan.admits, scheduler.running))
            if plan.opcode is Opcode.STEP:
                before, is_checked = self._step_seconds, False
                new_tokens, logprobs = self._execute(runner, plan)
                seconds = self._step_seconds - before
                batches = scheduler.update(new_tokens, time.time(), seconds, logprobs)
                if not scheduler.has_work:  # whoever gets the last batch finds the counters whole
                    self._read_counters(runner)
                if batches:
                    self._outbox.put(batches)
            elif is_still:
                continue  # all state stays as it is
            elif scheduler.waiting:
                raise RankError("requests wait but none can be scheduled", 0, self._step, "plan")
            elif not is_checked:  # idle again: whatever was leaked would stay so
                self._check_integrity(scheduler)
                self._read_counters(runner)
                is_checked = True
        self.comm.send_plan(encode(StepPlan(Opcode.STOP, self.epoch, self._step)))

    def _check_integrity(self, scheduler: Scheduler) -> None:
        try:
            scheduler.check_integrity()
        except AssertionError as error:
            raise RankError(
                f"rank 0 lost track of pages, slots or kept states by step {self._step}: {error}; "
                "the gang is restarted",
                rank=0, step=self._step, phase="integrity",
            ) from error  # fmt: skip
        self._integrity_checks += 1

    def _follow(self, runner: Runner) -> None:
        is_counted = True
        while True:
            plan = decode(self.comm.receive_plan())
            if plan.opcode is Opcode.STOP:
                return
            if plan.epoch != self.epoch:
                raise RankError(f"plan of epoch {plan.epoch}, not {self.epoch}", self.rank)
            if plan.admits:
                self._names.hear(plan.admits, self.comm.receive_plan())
            if plan.opcode is Opcode.STEP:
                self._execute(runner, plan)
                is_counted = False
            elif not is_counted:
                self._read_counters(runner)
                is_counted = True

    def _execute(self, runner: Runner, plan: StepPlan) -> tuple[list[list[int]], StepLogprobs]:
        """Rank 0: the new tokens of each sampled row, the one host read of a step.

        Where a row asks for log-probabilities, they are read, too. RankError with rank, step, phase
        and requests for whatever goes wrong in it.
        """
        began, clock = time.perf_counter(), runner.model.clock
        clock.begin()
        host, logprobs = [], StepLogprobs()
        try:
            sampled = runner.execute(plan)
            self.comm.check_order(plan.epoch, plan.step)  # a read may wait for a peer's collective
            if self.rank == 0:
                host, logprobs = sampled.tolist(), sampled.read_logprobs()
        except Exception as error:
            raise step_error(error, self.rank, plan, self._names) from error
        clock.end()
        self._step = plan.step
        self._busy_steps += 1
        self._nonfinite_rows += sum(row[-1] < 0 for row in host)
        now = time.perf_counter()
        self._step_seconds += now - began
        if now - self._counters_read_s > COUNTER_INTERVAL_S:
            self._read_counters(runner)
        return host, logprobs

    def _read_counters(self, runner: Runner) -> None:
        """Counters live on the device; they are read between steps, seldom."""
        self._counters_read_s = time.perf_counter()
        self._expert_counts = runner.expert_counts()
        self._copies = copy_figures(runner.store)

    def _drain_inbox(self, scheduler: Scheduler) -> None:
        """Takes all that arrived; waits for a heartbeat interval when there is nothing to do."""
        block = not scheduler.has_work or self.word.order.is_still
        while True:
            try:
                item = self._inbox.get(block=block, timeout=HEARTBEAT_S)
            except queue.Empty:
                return
            block = False
            if isinstance(item, EngineRequest):
                scheduler.add(item)
            else:
                scheduler.abort(item)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Rank 0: queues admitted requests for the next step."""
        for request in requests:
            self._inbox.put(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Rank 0: ends the named requests at the next step boundary; they produce no more."""
        self._inbox.put(tuple(request_ids))

    def obey(self, order: Order) -> None:
        """What the heat guard wants, from the next step and the next read of weights on."""
        self.word.give(order)
        self._inbox.put(())  # wakes whoever waits at work that has come to rest

    def stop(self) -> None:
        """Rank 0: ends the loop of every rank after the step in flight, or its own start."""
        self._stop.set()
        self._inbox.put(())

    def poll_outputs(self, timeout_s: float) -> tuple[TokenBatch, ...]:
        """Rank 0: what was generated since the last call; waits up to `timeout_s` for some."""
        try:
            batches = list(self._outbox.get(timeout=timeout_s))
        except queue.Empty:
            return ()
        while True:
            try:
                batches += self._outbox.get_nowait()
            except queue.Empty:
                return tuple(batches)

    def progress(self) -> LoadProgress:
        counter = self.counter
        return LoadProgress(
            self.rank, self._phase, counter.read_bytes, counter.planned_bytes, counter.elapsed_s()
        )

    def snapshot(self) -> RankSnapshot:
        scheduler, runner, plan = self.scheduler, self.runner, self.plan
        memory = dict(self._weight_bytes)
        if runner is not None:
            memory.update(runner.state_bytes())
        pages_total = plan.num_pages if plan else 0
        slots_total = self.config.max_sequences
        return RankSnapshot(
            rank=self.rank,
            epoch=self.epoch,
            time_s=time.time(),
            step=self._step,
            running=len(scheduler.running) if scheduler else 0,
            waiting=len(scheduler.waiting) if scheduler else 0,
            prompt_tokens=scheduler.prompt_tokens if scheduler else 0,
            generation_tokens=scheduler.generation_tokens if scheduler else 0,
            preemptions=scheduler.num_preemptions if scheduler else 0,
            draft_rounds=scheduler.draft_rounds if scheduler else 0,
            draft_tokens=scheduler.draft_rounds * self.config.mtp if scheduler else 0,
            accepted_by_position=tuple(scheduler.accepted_by_position) if scheduler else (),
            pages_used=pages_total - scheduler.cache.num_available if scheduler else 0,
            pages_total=pages_total,
            slots_used=slots_total - len(scheduler.free_slots) if scheduler else 0,
            slots_total=slots_total,
            step_seconds=self._step_seconds,
            step_parts=step_parts(runner),
            collective_seconds=self.comm.seconds,
            entered=self.comm.entered,
            busy_steps=self._busy_steps,
            weights_planned_bytes=self.counter.planned_bytes,
            weights_read_bytes=self.counter.read_bytes,
            load_seconds=self.counter.elapsed_s(),
            warm_step_seconds=self._warm_step_seconds,
            expert_tokens=self._expert_tokens(),
            nonfinite_rows=self._nonfinite_rows,
            eager_fallbacks=eager_fallbacks(runner),
            ops=op_implementations(runner) if self.rank == 0 else {},
            prefill_owed_seconds=scheduler.pacer.owed_s if scheduler else 0.0,
            integrity_checks=self._integrity_checks,
            recurrent_dtype=recurrent_dtype(runner.model) if runner else "",
            drafts=draft_figures(scheduler),
            prefix_cache=self._prefix_figures(),
            memory_bytes=memory,
            cpus=cpus_of(self._thread_id) if self._thread_id else (),
        )

    def _prefix_figures(self) -> PrefixFigures:
        if self.runner is None:
            return PrefixFigures()
        cache = self.scheduler.cache if self.scheduler else None
        return prefix_figures(self.runner.store, self._copies, cache)

    def expert_counts(self) -> list[list[int]]:
        """Tokens routed to each expert of each layer since the start, the same on every rank."""
        return self._expert_counts

    def _expert_tokens(self) -> int:
        """Token-expert pairs of this rank; those of a replicated expert are shared evenly."""
        if self.plan is None:
            return 0
        own, holders = self.plan.ranks[self.rank].share.experts, self.plan.replica_table
        layers = zip(self._expert_counts, own, holders, strict=False)
        return round(sum(c[e] / len(h[e]) for c, mine, h in layers for e in mine))

    def close(self) -> None:
        self.comm.close()
