"""The launcher without Ray: its ranks end with it, and their errors reach the caller."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placement.config import EngineConfig
from placement.errors import ConfigError, RankError
from placement.models.registry import load_model_spec
from rank_worker.guard_word import Order
from rank_worker.launch import Engine, launch_engine
from rank_worker.messages import EngineRequest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
ENDLESS = EngineRequest("endless", (1, 2, 3), 30_000, ignore_eos=True)
PARENT = """
import sys, threading
from placement.config import EngineConfig
from rank_worker.launch import launch_engine
from rank_worker.messages import EngineRequest

if __name__ == "__main__":
    config = EngineConfig(sys.argv[1], ranks=3, context_tokens=32000, step_timeout_s=600.0)
    with launch_engine(config) as engine:
        engine.rank0.submit([EngineRequest("endless", (1, 2, 3), 30_000, ignore_eos=True)])
        while not engine.rank0.poll_outputs(1.0):
            pass
        inside = threading.Event()

        def stay(x):
            inside.set()
            threading.Event().wait()

        engine.rank0.comm.all_reduce_ = stay  # the others now wait in a collective
        inside.wait()
        print(*(child.process.pid for child in engine._children), flush=True)
        threading.Event().wait()
"""

CALLER = """
import sys
from placement.config import EngineConfig
from placement.errors import NrankError
from rank_worker.launch import launch_engine

for folder, dtype in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        with launch_engine(EngineConfig(folder, ranks=2, dtype=dtype)):
            print("started")
    except NrankError as error:
        print(f"{type(error).__name__}: {error}")
"""


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(str(folder), **{"ranks": 2, "step_timeout_s": 5.0, **options})


def is_running(pid: int) -> bool:
    """A process that has ended but waits to be reaped counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def child_pids(engine: Engine) -> list[int]:
    pids = [child.process.pid for child in engine._children]
    assert all(pids)
    return [pid for pid in pids if pid]


def kill_when_generating(engine: Engine, pid: int) -> threading.Thread:
    def run() -> None:
        wait_until(lambda: engine.rank0.snapshot().generation_tokens > 3)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_killed_rank_ends_generate_with_an_error_that_names_it(embedded_model_dir: Path) -> None:
    threads_before = set(threading.enumerate())
    with launch_engine(config(embedded_model_dir, ranks=3, step_timeout_s=2.0)) as engine:
        pids = child_pids(engine)
        killer = kill_when_generating(engine, pids[1])
        with pytest.raises(RankError, match="rank 2 was killed by signal 9") as caught:
            engine.generate([ENDLESS])
        killer.join(PATIENCE_S)
    assert caught.value.rank == 2
    assert not [pid for pid in pids if is_running(pid)]
    assert set(threading.enumerate()) <= threads_before


def test_ranks_end_with_a_launcher_that_is_killed(embedded_model_dir: Path, tmp_path: Path) -> None:
    """At once, though they wait for rank 0 in a collective with a long timeout."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(embedded_model_dir)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    pids: list[int] = []
    try:
        assert parent.stdout is not None
        pids += map(int, parent.stdout.readline().split())
        assert len(pids) == 2
        assert all(is_running(pid) for pid in pids)
        parent.kill()
        parent.wait(PATIENCE_S)
        wait_until(lambda: not any(map(is_running, pids)))
    finally:
        for pid in filter(is_running, [parent.pid, *pids]):
            os.kill(pid, signal.SIGKILL)


def test_all_ranks_stop_at_the_end(embedded_model_dir: Path) -> None:
    threads_before = set(threading.enumerate())
    with launch_engine(config(embedded_model_dir)) as engine:
        pids = child_pids(engine)
        (result,) = engine.generate([EngineRequest("a", (5, 6), 4, ignore_eos=True)])
        assert len(result.token_ids) == 4
        children = [child.process for child in engine._children]
    assert [process.exitcode for process in children] == [0]
    assert not [pid for pid in pids if is_running(pid)]
    assert set(threading.enumerate()) <= threads_before


def test_an_error_in_the_callers_block_ends_the_ranks(embedded_model_dir: Path) -> None:
    class CallerError(Exception):
        pass

    pids = []

    def call() -> None:
        with launch_engine(config(embedded_model_dir)) as engine:
            pids.extend(child_pids(engine))
            engine.rank0.submit([ENDLESS])
            raise CallerError

    with pytest.raises(CallerError):
        call()
    assert not [pid for pid in pids if is_running(pid)]


@pytest.fixture
def overflowing(random_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint whose last expert, which only the last rank owns, is too large for float16."""
    source, folder = random_checkpoint(layers=4, experts="fused"), tmp_path / "overflowing"
    shutil.copytree(source, folder)
    _, headers = load_model_spec(str(folder))
    header = headers.tensors["model.layers.2.mlp.experts.down_proj"]
    with open(header.file, "r+b") as handle:
        handle.seek(header.offset + header.nbytes - 4)
        handle.write(struct.pack("<f", 1e9))
    return folder


def test_faults_of_a_checkpoint_are_one_line_for_the_caller(
    overflowing: Path, tmp_path: Path
) -> None:
    """One that all ranks find in the headers, one that only rank 1 meets while it reads."""
    truncated = tmp_path / "truncated"
    shutil.copytree(overflowing, truncated)
    shard = max(truncated.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 100)
    script = [sys.executable, "-c", CALLER, str(truncated), "float32", str(overflowing), "float16"]
    ended = subprocess.run(
        script, capture_output=True, text=True, timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    first, second = ended.stdout.splitlines()
    assert first.startswith(f"CheckpointError: {shard}")
    assert second == (
        "CheckpointError: tensor layers.2.channel.experts_down has values beyond float16's 65504: "
        "use --dtype float32"
    )
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_start_that_is_given_up_leaves_no_thread(embedded_model_dir: Path, ranks: int) -> None:
    """The interpreter aborts when it ends while a thread is inside a read or a collective."""
    engine = Engine(config(embedded_model_dir, ranks=ranks), give_up)
    engine.word.give(Order.HOLD)  # the load stands still
    try:
        with pytest.raises(InterruptedError):
            engine.start()
    finally:
        engine.close()
    assert not engine._thread.is_alive()


def give_up(_: object) -> None:
    raise InterruptedError


def test_a_rank_that_never_comes_leaves_no_thread(
    embedded_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for the others in its roll-call, which has a minute to go."""
    monkeypatch.setattr("rank_worker.launch._child_main", wait_for_ever)
    engine = Engine(config(embedded_model_dir, start_timeout_s=60.0), give_up)
    try:
        with pytest.raises(InterruptedError):
            engine.start()
    finally:
        engine.close()
    assert not engine._thread.is_alive()


def wait_for_ever(*_: object) -> None:
    threading.Event().wait()


def test_packages_where_the_user_stands_are_not_ours(
    embedded_model_dir: Path, tmp_path: Path
) -> None:
    """A folder `ops` in the current directory must not take the place of ours in any rank."""
    elsewhere = tmp_path / "work"
    (elsewhere / "ops").mkdir(parents=True)
    (elsewhere / "ops" / "__init__.py").write_text("raise RuntimeError('not ours')")
    script = tmp_path / "script.py"
    script.write_text(CALLER)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(script), str(embedded_model_dir), "float32"],
        cwd=elsewhere, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert "not ours" not in run.stderr
    assert run.returncode == 0, run.stderr


def test_more_ranks_than_experts_are_refused(embedded_model_dir: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"ranks = 15, but the model has 14 experts"),
        launch_engine(config(embedded_model_dir, ranks=15)),
    ):
        raise AssertionError("it can't start")


@pytest.mark.slow
def test_as_many_ranks_as_experts(embedded_model_dir: Path) -> None:
    """Ranks without a head, without a row of some table, and with one expert each."""
    one = EngineRequest("a", tuple(range(50, 90)), 6, ignore_eos=True)
    answers = []
    for ranks in (1, 14):
        with launch_engine(config(embedded_model_dir, ranks=ranks, step_timeout_s=60.0)) as engine:
            answers.append(engine.generate([one])[0].token_ids)
    assert answers[0] == answers[1]
