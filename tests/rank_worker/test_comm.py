"""Collectives: sums in rank order, equal bits everywhere, clear ends when a rank dies."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from placement.config import EngineConfig
from placement.errors import ConfigError, RankError
from rank_worker import comm_shm, comm_store
from rank_worker.comm import Comm, LocalComm, choose_comm, make_comm

SCRIPT = Path(__file__).with_name("comm_gang.py")
ROOT = Path(__file__).parents[2]
BOTH = pytest.mark.parametrize("name", ["shm", "gloo"])
Reports = dict[int, dict[str, Any]]


class Gangs:
    """A process that forks gangs of ranks on request, one after the other."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def start(self, scenario: str, name: str, world: int, out: Path, seed: int = 1) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{scenario} {name} {world} {seed} {out}\n")
        self.process.stdin.flush()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Reports of the running gang's ranks until its last rank has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.strip():
                return
            yield json.loads(line)

    def finish(self) -> Reports:
        return {report["rank"]: report for report in self.lines()}

    def run(self, scenario: str, name: str, world: int, out: Path) -> Reports:
        self.start(scenario, name, world, out)
        return self.finish()

    def kill(self) -> None:
        """End the process and all ranks it has forked, as a power cut would."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def gangs() -> Iterator[Gangs]:
    running = Gangs()
    yield running
    running.kill()


@pytest.fixture
def other_gangs() -> Iterator[Gangs]:
    running = Gangs()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def gang() -> ModuleType:
    spec = spec_from_file_location("comm_gang", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_sums(gang: ModuleType, world: int, seed: int, out: Path) -> None:
    seen = [np.load(out / f"rank{rank}.npz") for rank in range(world)]
    for key in seen[0]:
        for other in seen[1:]:
            assert seen[0][key].tobytes() == other[key].tobytes(), key
    for dtype in gang.DTYPES:
        for size in gang.SIZES:
            parts = [gang.part(seed, rank, size, dtype) for rank in range(world)]
            wide = torch.float32 if dtype.itemsize == 2 else dtype
            total = parts[0].to(wide)
            for x in parts[1:]:
                total = total + x.to(wide)
            expected = gang.as_bytes(total.to(dtype))
            assert seen[0][f"sum {dtype} {size}"].tobytes() == expected.tobytes(), (dtype, size)
            gathered = gang.as_bytes(torch.stack(parts))
            assert seen[0][f"gather {dtype} {size}"].tobytes() == gathered.tobytes()
    for size in gang.PLAN_SIZES:
        assert np.array_equal(seen[-1][f"plan {size}"], np.arange(size, dtype=np.int32) * 7 + seed)
    assert seen[0]["entered"] > len(seen[0])  # and the same on all ranks, as all keys
    last = seen[0]["repeat 199"].view(np.float32)
    assert last.tolist() == [float(199 * world + sum(range(world)))] * 17


@pytest.mark.parametrize(
    ("name", "world"),
    [
        *(("shm", 2), ("shm", 3), ("shm", 4), ("gloo", 2), ("gloo", 3)),
        pytest.param("gloo", 4, marks=pytest.mark.slow),
    ],
)
def test_every_rank_gets_the_bits_of_the_sum_in_rank_order(
    gangs: Gangs, gang: ModuleType, tmp_path: Path, name: str, world: int
) -> None:
    reports = gangs.run("sums", name, world, tmp_path)
    assert {r["result"] for r in reports.values()} == {"done"}, reports
    check_sums(gang, world, 1, tmp_path)


def test_two_gangs_of_one_machine_do_not_mix(
    gangs: Gangs, other_gangs: Gangs, gang: ModuleType, tmp_path: Path
) -> None:
    both = [gangs, other_gangs]
    for seed, running in enumerate(both):
        (tmp_path / str(seed)).mkdir()
        running.start("sums", "shm", 2, tmp_path / str(seed), seed)
    for seed, running in enumerate(both):
        running.finish()
        check_sums(gang, 2, seed, tmp_path / str(seed))


@BOTH
def test_a_killed_peer_ends_the_wait_with_an_error(gangs: Gangs, tmp_path: Path, name: str) -> None:
    reports = gangs.run("dead_peer", name, 3, tmp_path)
    assert sorted(reports) == [0, 2]
    for report in reports.values():
        assert report["result"] == "RankError"
        if name == "shm":
            assert "ranks [1] did not reach collective 2" in report["detail"]["message"]


@BOTH
def test_a_killed_leader_ends_the_wait_for_a_plan(gangs: Gangs, tmp_path: Path, name: str) -> None:
    reports = gangs.run("dead_leader", name, 2, tmp_path)
    assert reports[1]["result"] == "RankError"
    assert "\n" not in reports[1]["detail"]["message"]


@BOTH
def test_a_rank_that_never_joins_is_named(gangs: Gangs, tmp_path: Path, name: str) -> None:
    reports = gangs.run("late_rank", name, 3, tmp_path)
    assert reports[0]["detail"]["rank"] == 1
    assert "ranks [1] did not arrive" in reports[0]["detail"]["message"]


@BOTH
def test_ranks_in_different_steps_are_told_apart(gangs: Gangs, tmp_path: Path, name: str) -> None:
    reports = gangs.run("different_steps", name, 2, tmp_path)
    message = reports[0]["detail"]["message"]
    assert "a sum of 32 bytes here and a gather of 32 bytes on rank 1" in message


@BOTH
def test_a_collective_in_another_order_is_told_by_every_rank(
    gangs: Gangs, tmp_path: Path, name: str
) -> None:
    """No process ends by it, and nobody waits for a deadline, which is 30 s."""
    reports = gangs.run("other_order", name, 3, tmp_path)
    assert sorted(reports) == [0, 1, 2]
    here, there = "a gather of 32 bytes here", "a sum of 16384 bytes on rank 1"
    for rank in (0, 2):
        detail = reports[rank]["detail"]
        assert (detail["rank"], "\n" in detail["message"]) == (1, False)
        assert f"rank {rank}: collective 2 is {here} and {there};" in detail["message"]
    assert "a sum of 16384 bytes here and a gather of 32 bytes on rank 0" in str(reports[1])


def test_killed_ranks_leave_no_shared_memory_behind(other_gangs: Gangs, tmp_path: Path) -> None:
    other_gangs.start("wait_for_kill", "shm", 2, tmp_path)
    reports = list(itertools.islice(other_gangs.lines(), 2))
    for report in reports:
        assert report["result"] == "shared"
        assert report["detail"] is False, "a named file in /dev/shm would outlive a killed rank"
    other_gangs.kill()
    assert not [f for f in os.listdir("/dev/shm") if "nrank" in f]


def open_threads(world: int, open_one: Callable[[comm_store.Meeting], Comm]) -> list[Comm]:
    store, port = comm_store.listen("127.0.0.1", 30)
    comms: dict[int, Comm] = {}

    def join(rank: int) -> None:
        own = store if rank == 0 else None
        comms[rank] = open_one(comm_store.join(rank, world, "127.0.0.1", port, 30, own))

    in_threads(world, join)
    return [comms[rank] for rank in range(world)]


def in_threads(world: int, run: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 65, 1000])
def test_ranks_of_one_process_reduce_in_chunks_of_a_small_segment(size: int) -> None:
    world = 3
    comms = open_threads(world, lambda meeting: comm_shm.open_shm(meeting, 30, half_bytes=64))
    results: dict[int, list[torch.Tensor]] = {}

    def run(rank: int) -> None:
        x = torch.arange(size, dtype=torch.float32) + rank
        gathered = comms[rank].all_gather(x)
        results[rank] = [comms[rank].all_reduce_(x), gathered]
        comms[rank].close()

    in_threads(world, run)
    for total, gathered in results.values():
        assert torch.equal(total, torch.arange(size) * 3.0 + 3)
        assert torch.equal(gathered, torch.stack([torch.arange(size) + r for r in range(3)]))


def test_a_plan_of_another_type_is_refused() -> None:
    comms = open_threads(2, lambda meeting: comm_shm.open_shm(meeting, 30))
    with pytest.raises(RankError, match="int32 words in one dimension, got int64"):
        comms[0].send_plan(np.zeros(3, dtype=np.int64))
    for comm in comms:
        comm.close()


def test_a_gang_of_one_opens_nothing() -> None:
    comm = make_comm(EngineConfig(model_dir=""), 0, 1)
    assert isinstance(comm, LocalComm)
    x = torch.ones(3)
    assert comm.all_reduce_(x) is x
    assert comm.all_gather(x).shape == (1, 3)


def test_the_choice_follows_device_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert choose_comm(EngineConfig(model_dir="")) == "shm"
    assert choose_comm(EngineConfig(model_dir="", device="cuda")) == "nccl"
    assert choose_comm(EngineConfig(model_dir="", device="npu")) == "hccl"
    assert choose_comm(EngineConfig(model_dir="", comm="gloo")) == "gloo"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert choose_comm(EngineConfig(model_dir="")) == "gloo"
    with pytest.raises(ConfigError, match="'shm' needs an x86-64 CPU, this is aarch64"):
        make_comm(EngineConfig(model_dir="", comm="shm"), 0, 2)
    with pytest.raises(ConfigError, match="'mpi' is not built in"):
        make_comm(EngineConfig(model_dir="", comm="mpi"), 0, 2)
    for device, comm in (("cpu", "nccl"), ("cuda", "gloo"), ("npu", "shm")):
        with pytest.raises(ConfigError, match=f"'{comm}' does not carry tensors of {device}"):
            make_comm(EngineConfig(model_dir="", device=device, comm=comm), 0, 2)
