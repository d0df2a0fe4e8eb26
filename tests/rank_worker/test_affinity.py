"""Cores of ranks: dealt whole and apart, set on the thread that steps, read back."""

from __future__ import annotations

import os
import threading

import pytest

from cluster.ray_gang import RankWorker
from placement.config import EngineConfig
from rank_worker import affinity
from rank_worker.affinity import cpus_text, deal_cores, parse_cpus, pin_thread, read_cores
from rank_worker.launch import launch_engine
from rank_worker.start_report import RankBytes, StartReport


@pytest.fixture
def sysfs(tmp_path):
    """32 cores of two threads each (cpu n and n + 32), the last 16 on a second memory node."""
    for cpu in range(64):
        folder = tmp_path / f"cpu/cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        core = cpu % 32
        (folder / "topology/thread_siblings_list").write_text(f"{core},{core + 32}\n")
        (folder / f"node{core // 16}").mkdir()
    return tmp_path


@pytest.mark.parametrize("chips", [1, 2, 3, 4, 6, 8])
def test_each_chip_gets_as_many_whole_cores_and_a_share_is_left(sysfs, chips):
    cores = read_cores(set(range(64)), sysfs)
    shares = deal_cores(cores, chips)
    dealt = [cpu for share in shares for cpu in share]
    assert len(shares) == chips
    assert {len(share) for share in shares} == {32 // (chips + 1) * 2}
    assert len(set(dealt)) == len(dealt), "a processor is dealt twice"
    for share in shares:
        assert {cpu ^ 32 for cpu in share} == set(share), "a core is split between chips"
    assert 64 - len(dealt) >= len(shares[0]), "nothing is left for the rest"


def test_cores_of_one_memory_node_lie_together(sysfs):
    nodes = [core[0] // 16 for core in read_cores(set(range(64)), sysfs)]
    assert nodes == sorted(nodes)


def test_processors_that_a_container_may_not_use_are_not_dealt(sysfs):
    """Of cores 0-7 both threads, of 8-11 one."""
    allowed = {*range(12), *range(32, 40)}
    cores = read_cores(allowed, sysfs)
    assert len(cores) == 12
    assert {cpu for core in cores for cpu in core} == allowed
    assert {cpu for share in deal_cores(cores, 3) for cpu in share} <= allowed


def test_without_a_topology_each_processor_is_a_core(tmp_path):
    assert read_cores({0, 1, 5}, tmp_path) == [(0,), (1,), (5,)]


@pytest.mark.parametrize(("cores", "chips"), [(2, 1), (2, 2), (5, 2), (9, 4)])
def test_too_few_cores_pin_nothing_and_say_so(monkeypatch, tmp_path, cores, chips):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("pinned"))
    reason = pin_thread(0, chips, tmp_path, tmp_path / "none")
    assert reason == f"{cores} cores are too few for {chips} chips and the rest at 2 each"


@pytest.mark.parametrize(
    ("quota", "told"), [("800000 100000\n", "the time of 8"), ("max 100000\n", "")]
)
def test_a_bounded_container_is_not_pinned(monkeypatch, sysfs, quota, told):
    set_to = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: set_to.append(cpus))
    (sysfs / "cpu.max").write_text(quota)
    reason = pin_thread(1, 4, sysfs, sysfs / "cpu.max")
    assert told in reason
    assert set_to == ([] if told else [(*range(6, 12), *range(38, 44))])


def test_a_refusal_of_the_system_is_told(monkeypatch, sysfs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert pin_thread(0, 4, sysfs, sysfs / "none") == (
        "the system refused: Operation not permitted"
    )


def test_lists_are_read_and_written_as_the_kernel_has_them():
    assert parse_cpus("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert cpus_text([11, 0, 2, 1, 3, 10, 8]) == "0-3,8,10-11"
    assert cpus_text(()) == ""


@pytest.fixture
def one_core_is_enough(monkeypatch):
    """So that a machine of two can pin a rank; the whole mask, and the core of its first chip."""
    monkeypatch.setattr(affinity, "MIN_CORES", 1)
    whole = os.sched_getaffinity(0)
    shares = deal_cores(read_cores(whole), 1)
    if not shares or set(shares[0]) == whole:
        pytest.skip(f"{len(whole)} processors: a share can't be told from all of them")
    return tuple(sorted(whole)), shares[0]


@pytest.mark.parametrize("pinned", [True, False])
def test_the_step_loop_runs_on_its_cores_and_the_launcher_where_it_did(
    embedded_model_dir, one_core_is_enough, pinned
):
    whole, share = one_core_is_enough
    config = EngineConfig(str(embedded_model_dir), context_tokens=128, pin_cpus=pinned)
    with launch_engine(config) as engine:
        expected = share if pinned else whole
        assert engine.rank0.snapshot().cpus == expected
        line = engine.start_report().lines()[-1]
        assert line == f"processors: rank 0 on {cpus_text(expected)}"
        assert os.sched_getaffinity(0) == set(whole)


def test_ranks_that_share_processors_are_told_so():
    ranks = tuple(RankBytes(rank, 1, 1) for rank in range(2))
    report = StartReport(0.001, 0.002, 0, ranks, cpus=((0, 1), (0, 1)))
    assert report.lines()[-1] == "processors: 0-1, shared by all ranks"
    report = StartReport(0.001, 0.002, 0, ranks, cpus=((0, 1), (2, 3)))
    assert report.lines()[-1] == "processors: rank 0 on 0-1, rank 1 on 2-3"


@pytest.mark.parametrize("pinned", [True, False])
def test_an_actor_pins_the_thread_that_it_is_assigned_on(one_core_is_enough, pinned):
    whole, share = one_core_is_enough
    seen = []

    def factory(config, rank, world_size):
        seen.append(tuple(sorted(os.sched_getaffinity(0))))
        raise ValueError("far enough")

    def assign():
        worker = RankWorker(EngineConfig("unused", pin_cpus=pinned), "nrank_chip", 0)
        with pytest.raises(ValueError, match="far enough"):
            worker.assign(factory, 0, 1, (0, 1))

    thread = threading.Thread(target=assign)
    thread.start()
    thread.join()
    assert seen == [share if pinned else whole]
