"""What telemetry costs beside the ranks themselves: `python -m tests.serve.telemetry_cost`.

A real `nrank serve` answers for a minute and is scraped every second. Telemetry is what was counted
there (steps, a snapshot a second of each rank, a page a second) times what each takes, measured in
this process: processor time, which other work on the machine hardly changes. Reading sensors is
measured with a recorded table of six chips. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from cluster.engine_metrics import EngineMetrics
from deploy.defaults import EMBEDDED_MODEL
from placement.config import EngineConfig
from placement.prepare import prepare
from rank_worker.device_sensors.smi_table import parse_info
from rank_worker.messages import EngineRequest, RankSnapshot
from rank_worker.rank import Rank
from rank_worker.step_clock import StepClock, StepPart
from tests.serve.front import served
from tests.serve.overhead import cpu_seconds

TABLE = Path(__file__).parents[1] / "rank_worker/sensors/npu_smi/info_300iduo_six_chips_ecc_on.txt"
DRAFTS = 2
CLIENTS = 2
LIMIT_S = 300.0


class CountingClock(StepClock):
    """How often a step marks."""

    marks = 0

    def mark(self, part: StepPart) -> None:
        self.marks += 1
        super().mark(part)


def cost_s(call: Callable[[], object], repeats: int) -> float:
    """Processor time of one call of this thread."""
    call()
    before = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - before) / repeats


def unit_costs(ranks: int) -> dict[str, float]:
    """Seconds of a step's marks, a rank's snapshot, the coordinator's page, a table of sensors."""
    config = EngineConfig(str(EMBEDDED_MODEL), mtp=DRAFTS)
    rank = Rank(config, 0, 1)
    rank.open(0)
    rank.load()
    assert rank.runner is not None
    assert rank.scheduler is not None
    clock = rank.runner.model.clock = CountingClock(rank.comm)
    rank.submit([EngineRequest("r", tuple(range(3, 20)), 64, ignore_eos=True)])
    rank._drain_inbox(rank.scheduler)
    steps = 0
    while rank.scheduler.has_work:
        new, logprobs = rank._execute(rank.runner, rank.scheduler.schedule())
        rank.scheduler.update(new, time.time(), 0.0, logprobs)
        steps += 1
    marks_a_step = clock.marks / steps
    plain = StepClock(rank.comm)
    metrics = EngineMetrics("m", ranks)
    metrics.set_plan(prepare(config).plan)
    told = rank.snapshot()

    def page() -> None:
        metrics.update_snapshots(_renewed(told, one) for one in range(ranks))
        metrics.render()

    text = TABLE.read_text()
    found = {
        "marks_a_step": marks_a_step,
        "step_s": marks_a_step * cost_s(lambda: plain.mark(StepPart.HOST), 100_000),
        "snapshot_s": cost_s(lambda: pickle.loads(pickle.dumps(rank.snapshot())), 300),
        "page_s": cost_s(page, 100),
        "sensors_s": cost_s(lambda: parse_info(text), 300),
    }
    rank.close()
    return found


def _renewed(told: RankSnapshot, rank: int) -> RankSnapshot:
    return RankSnapshot(**{**vars(told), "rank": rank, "time_s": time.time()})


def steps_of(page: str) -> float:
    """Steps of all ranks so far."""
    found = re.findall(r"^nrank_rank_step_seconds_count\{.*\} (\S+)$", page, re.M)
    return sum(map(float, found))


def served_minute(base_url: str, seconds: float) -> tuple[float, float]:
    """Steps of all ranks, and processor time of the ranks, while clients ask without a pause."""
    stop = threading.Event()
    with httpx.Client(base_url=base_url, timeout=LIMIT_S) as client:

        def ask(prompt: str) -> None:
            body = {
                "model": "tiny-flash-next", "prompt": prompt, "max_tokens": 64,
                "temperature": 0, "ignore_eos": True,
            }  # fmt: skip
            while not stop.is_set():
                client.post("/v1/completions", json=body).raise_for_status()

        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(ask, f"The river {number}") for number in range(CLIENTS)]
            before, steps = cpu_seconds()["ranks"], steps_of(client.get("/metrics").text)
            ends_s = time.monotonic() + seconds
            while time.monotonic() < ends_s:
                client.get("/metrics")
                time.sleep(1.0)
            used = cpu_seconds()["ranks"] - before
            steps = steps_of(client.get("/metrics").text) - steps
            stop.set()
        for one in clients:
            one.result()
    return steps, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    costs = unit_costs(arguments.ranks)
    overrides = {"ranks": arguments.ranks, "mtp": DRAFTS}
    with served(overrides) as base_url:
        steps, ranks_s = served_minute(base_url, arguments.seconds)
    each_s = costs["snapshot_s"] * arguments.ranks + costs["page_s"] + costs["sensors_s"]
    telemetry_s = steps * costs["step_s"] + arguments.seconds * each_s
    figures = {
        **costs, "steps": steps, "ranks_cpu_s": ranks_s, "telemetry_cpu_s": telemetry_s,
        "share": telemetry_s / ranks_s,
    }  # fmt: skip
    for name, value in figures.items():
        print(f"{name:16} {value:12.6f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
