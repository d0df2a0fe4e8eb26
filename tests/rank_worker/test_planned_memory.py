"""What a plan says a rank will hold, beside what a process of its own really takes.

A checkpoint of 1 GiB makes the process' own memory small beside the weights. Sizes of processes
come from /proc, bytes read from the kernel's count.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from placement.config import EngineConfig
from placement.plan import Plan
from placement.prepare import prepare
from rank_worker.launch import Engine, launch_engine
from rank_worker.messages import EngineRequest
from rank_worker.step_plan import StepPlan

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
CHUNK_BYTES = 32 * MIB
UNMEASURED = ("workspace", "reserve", "graph", "collective")
OVERHEAD = 64 * MIB  # of a process: threads, stacks, code
CONTEXT_TOKENS = 32
RANK = """
import ctypes, json, os, sys, threading
from placement.config import EngineConfig
from rank_worker.messages import EngineRequest
from rank_worker.rank import Rank

def memory():
    ctypes.CDLL(None).malloc_trim(0)
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    sizes = {key: int(line.split()[0]) * 1024 for key, line in lines.items() if "kB" in line}
    return {"own": sizes["RssAnon"] + sizes["RssShmem"], "peak": sizes["VmHWM"]}

def bytes_read():
    return int(open("/proc/self/io").readline().split()[1])

config, number = EngineConfig(**json.loads(sys.argv[1])), int(sys.argv[2])
rank = Rank(config, number, config.ranks)
port = 0
if config.ranks > 1:
    if number == 0:
        print(rank.listen(), flush=True)
    port = int(sys.stdin.readline())
rank.open(port)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
before, read = memory(), bytes_read()
resident = before["peak"]
rank.load()
loaded, read = memory(), bytes_read() - read
if number == 0:
    runner = threading.Thread(target=rank.run)
    runner.start()
    rank.submit([EngineRequest("a", tuple(range(1, 17)), 4, ignore_eos=True)])
    while not any(b.finish_reason for b in rank.poll_outputs(1.0)):
        pass
    rank.stop()
    runner.join()
else:
    rank.run()
snapshot = rank.snapshot()
print(json.dumps({
    "before": before["own"], "loaded": loaded["own"], "served": memory()["own"],
    "resident": resident, "peak": loaded["peak"], "read": read, "rows": snapshot.memory_bytes,
    "counted": [snapshot.weights_planned_bytes, snapshot.weights_read_bytes],
    "steps": snapshot.step, "nonfinite": snapshot.nonfinite_rows,
}), flush=True)
os._exit(0)  # as ranks end: a thread of a group may still hold a tensor, and would abort the exit
"""


@dataclass(frozen=True)
class Measured:
    """One rank's process, in bytes. `rows` are tensors by ledger row.

    Three sizes without code and what the C library keeps, `resident` and `peak` with all.
    """

    before: int
    loaded: int
    served: int
    resident: int  # at the start of the load
    peak: int  # of the load
    read: int
    rows: dict[str, int]
    counted: list[int]
    steps: int
    nonfinite: int


@pytest.fixture(scope="module")
def wide_checkpoint() -> ModuleType:
    """The generator of random checkpoints, with experts that come to 1 GiB in 8 layers."""
    path = ROOT / "tests" / "golden" / "tiny_checkpoint.py"
    spec = spec_from_file_location("wide_checkpoint", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.HIDDEN, module.EXPERT_DIM, module.LOW_RANK = 512, 3072, 64
    return module


@pytest.fixture(scope="module")
def gigabyte_model(wide_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """BF16 weights of random sign and digits, all of a size between 2^-7 and 2^-6: finite."""
    folder = tmp_path_factory.mktemp("gigabyte")
    variant = wide_checkpoint.Variant(layers=8, mtp=False)
    config = wide_checkpoint.config(variant) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    named = [
        (name, part)
        for whole, shape in shapes(wide_checkpoint, variant)
        for name, part in wide_checkpoint._on_disk(
            variant, whole, torch.empty(shape, dtype=torch.bfloat16, device="meta")
        )
    ]
    write_random(folder / "model.safetensors", named)
    yield str(folder)
    shutil.rmtree(folder)


def shapes(wide: Any, variant: Any) -> list[tuple[str, tuple[int, ...]]]:
    found = [("model.embed_tokens.weight", (wide.VOCAB, wide.HIDDEN))]
    found += [("lm_head.weight", (wide.VOCAB, wide.HIDDEN))]
    found += wide._residual("model.hyper_connection_mixer", inject=False)
    for layer in range(variant.layers):
        attention = (layer + 1) % wide.ATTENTION_EVERY == 0
        found += wide._layer(f"model.layers.{layer}", attention, ngram=layer == 1)
    return found


def write_random(path: Path, named: list[tuple[str, torch.Tensor]]) -> None:
    header, at = {}, 0
    for name, part in named:
        span = [at, at + part.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(part.shape), "data_offsets": span}
        at = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digits = np.random.default_rng(7).integers(0, 1 << 16, CHUNK_BYTES // 2, dtype=np.uint16)
    chunk = (digits & 0x807F | 0x3C00).tobytes()
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for first in range(0, at, CHUNK_BYTES):
            out.write(chunk[: at - first])


@pytest.fixture(scope="module")
def processes(gigabyte_model: str) -> Callable[[int], tuple[Plan, list[Measured]]]:
    """Runs a gang with each rank in a process of its own, once a rank count."""
    done: dict[int, tuple[Plan, list[Measured]]] = {}

    def run(ranks: int) -> tuple[Plan, list[Measured]]:
        if ranks not in done:
            config = EngineConfig(
                gigabyte_model, ranks=ranks, dtype="bfloat16", max_sequences=2, page_tokens=16,
                context_tokens=CONTEXT_TOKENS, step_timeout_s=120.0,
            )  # fmt: skip
            done[ranks] = prepare(config).plan, run_gang(config)
        return done[ranks]

    return run


def run_gang(config: EngineConfig) -> list[Measured]:
    text = json.dumps(asdict(config))
    children = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, text, str(rank)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(config.ranks)
    ]  # fmt: skip
    try:
        if config.ranks > 1:
            assert children[0].stdout is not None
            port = children[0].stdout.readline()
            for child in children:
                assert child.stdin is not None
                child.stdin.write(port)
                child.stdin.flush()
        outputs = [child.communicate(timeout=240)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0] * config.ranks
    return [Measured(**json.loads(output)) for output in outputs]


def tensors(rows: dict[str, int]) -> int:
    return sum(size for row, size in rows.items() if row not in UNMEASURED)


RANKS = [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 4, 6))]
every_rank_count = pytest.mark.parametrize("ranks", RANKS)
Processes = Callable[[int], tuple[Plan, list[Measured]]]


@every_rank_count
def test_tensors_take_what_was_planned(processes: Processes, ranks: int) -> None:
    plan, measured = processes(ranks)
    for rank, found in zip(plan.ranks, measured, strict=True):
        planned = tensors(dict(rank.rows))
        assert abs(tensors(found.rows) - planned) <= planned / 100
        assert (found.steps, found.nonfinite) == (4, 0), "it did not serve what it was given"


@every_rank_count
def test_a_process_grows_by_what_was_planned(processes: Processes, ranks: int) -> None:
    """After the load, and after it has served: nothing of what loading needed is kept."""
    plan, measured = processes(ranks)
    for rank, found in zip(plan.ranks, measured, strict=True):
        planned = tensors(dict(rank.rows))
        for size in (found.loaded, found.served):
            growth = size - found.before
            assert 0.95 * planned - OVERHEAD <= growth <= 1.05 * planned + OVERHEAD, found


@every_rank_count
def test_a_load_needs_little_more_than_what_it_keeps(processes: Processes, ranks: int) -> None:
    plan, measured = processes(ranks)
    for rank, found in zip(plan.ranks, measured, strict=True):
        owned = tensors(dict(rank.rows))
        assert owned * 0.95 < found.peak - found.resident <= 1.15 * owned + OVERHEAD, found


@every_rank_count
def test_a_rank_reads_the_bytes_it_owns_once(processes: Processes, ranks: int) -> None:
    """By the kernel's count, headers included; and by the rank's own, to the byte."""
    _, measured = processes(ranks)
    for found in measured:
        planned, read = found.counted
        assert planned == read
        assert read <= found.read <= 1.02 * read, found


@every_rank_count
def test_tensors_of_the_embedded_model_take_what_was_planned(
    embedded_model_dir: Path, ranks: int
) -> None:
    config = EngineConfig(str(embedded_model_dir), ranks=ranks, context_tokens=1024)
    plan = prepare(config).plan
    with launch_engine(config) as engine:
        for rank, found in zip(plan.ranks, engine.snapshots, strict=True):
            planned, measured = tensors(dict(rank.rows)), tensors(found.memory_bytes)
            assert abs(measured - planned) <= planned / 100
            assert found.weights_planned_bytes == found.weights_read_bytes


@dataclass(frozen=True)
class Course:
    """How a run of full-length sequences went: the most that ran and that waited at a time."""

    running: int
    waiting: int
    preemptions: int
    lengths: list[int]


def run_full_length(engine: Engine, count: int) -> Course:
    """`count` sequences that end where the context ends, all there after the first step."""
    config, scheduler = engine.config, engine.rank0.scheduler
    assert scheduler is not None
    answer = config.page_tokens  # the prompt fills all pages but the last
    prompt = range(1, config.context_tokens - answer + 1)
    requests = [
        EngineRequest(f"{count}-{i}", tuple((i + t) % 500 for t in prompt), answer, ignore_eos=True)
        for i in range(count)
    ]
    running, waiting, all_here, schedule = [0], [0], threading.Event(), scheduler.schedule

    def watched() -> StepPlan:
        assert all_here.wait(60)
        plan = schedule()
        running.append(len(scheduler.running))
        waiting.append(len(scheduler.waiting))
        return plan

    scheduler.schedule = watched  # type: ignore[method-assign]
    before = scheduler.num_preemptions
    engine.rank0.submit(requests)
    all_here.set()
    lengths = dict.fromkeys((r.request_id for r in requests), len(prompt))
    left = count
    while left:
        for batch in engine.rank0.poll_outputs(60):
            lengths[batch.request_id] += len(batch.token_ids)
            left -= batch.finish_reason is not None
    scheduler.schedule = schedule  # type: ignore[method-assign]
    preemptions = scheduler.num_preemptions - before
    return Course(max(running), max(waiting), preemptions, list(lengths.values()))


def check_claim(config: EngineConfig) -> None:
    plan = prepare(config).plan
    claimed, full = plan.full_sequences, config.context_tokens
    with launch_engine(config) as engine:
        for count in (claimed, claimed + 1):
            course = run_full_length(engine, count)
            assert course == Course(claimed, count - claimed, 0, [full] * count)


@every_rank_count
@pytest.mark.parametrize(("max_sequences", "pool"), [(3, 0), (6, 3)], ids=["slots", "pages"])
def test_the_claimed_sequences_run_at_once_and_one_more_queues(
    embedded_model_dir: Path, ranks: int, max_sequences: int, pool: int
) -> None:
    """Whether slots or pages are what limits them."""
    config = EngineConfig(
        str(embedded_model_dir), ranks=ranks, context_tokens=128, page_tokens=16,
        max_sequences=max_sequences, kv_pool_tokens=pool * 128, step_timeout_s=60.0,
    )  # fmt: skip
    assert prepare(config).plan.full_sequences == 3
    check_claim(config)


@pytest.mark.slow
def test_the_claimed_sequences_of_the_large_model_run_at_once(gigabyte_model: str) -> None:
    config = EngineConfig(
        gigabyte_model, ranks=2, dtype="bfloat16", context_tokens=CONTEXT_TOKENS, page_tokens=16,
        max_sequences=2, step_timeout_s=120.0,
    )  # fmt: skip
    check_claim(config)
