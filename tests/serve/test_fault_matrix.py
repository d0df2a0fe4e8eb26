"""Every fault in every phase on every process, on a real server: what clients see, what is left.

Not in the table, because there is no such thing: logits that are NaN while weights load, while the
gang is idle, or in the coordinator, which has none. `slow` is late but within its deadlines and
must be served; `stuck` never ends a step. A coordinator that is slow or stuck does not come back to
its event loop; `raise` is a fault in its own work. Its phase is that of rank 0.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from tests.serve.fault_server import (
    LOAD_TIMEOUT_S,
    RANKS,
    STEP_TIMEOUT_S,
    FaultServer,
    Trace,
    replica_pid,
)
from tests.serve.faulty_rank import Order

pytestmark = pytest.mark.ray

HUNG_S = 40.0  # the docs: after three missed health checks a coordinator that hangs is killed
SLACK_S = 10.0  # of a busy machine, above what is promised
COORDINATOR = "coordinator"
LONG = 8000
PROMPT, SHORT, ANSWER = "The river", 12, 60
QUICK = {
    ("kill", "prefill", 0),
    ("kill", "idle", 1),
    ("stop", "decode", 0),
    ("raise", "decode", 1),
    ("nan", "prefill", 0),
    ("nan", "decode", 1),
    ("slow", "decode", 1),
    ("slow", "idle", 0),
}


@dataclass(frozen=True)
class Cell:
    act: str
    phase: str
    target: int | str

    @property
    def limit_s(self) -> float:
        """From the fault to the error at the client."""
        if self.phase == "load":
            return LOAD_TIMEOUT_S + SLACK_S
        return SLACK_S + (0 if self.act in ("kill", "raise") else STEP_TIMEOUT_S)

    @property
    def ends_gang(self) -> bool:
        return self.act not in ("nan", "slow")

    @property
    def rank(self) -> int:
        return self.target if isinstance(self.target, int) else 0

    def is_real(self) -> bool:
        if self.act != "nan":
            return True
        return self.phase in ("prefill", "decode") and self.target != COORDINATOR

    def param(self) -> Any:
        name = f"{self.act}-{self.phase}-{self.target}"
        quick = (self.act, self.phase, self.target) in QUICK
        return pytest.param(self, id=name, marks=() if quick else pytest.mark.slow)


ACTS = ("kill", "stop", "raise", "nan", "slow", "stuck")
PHASES = ("load", "prefill", "decode", "idle")
CELLS = [
    cell.param()
    for cell in (Cell(*key) for key in product(ACTS, PHASES, (0, 1, COORDINATOR)))
    if cell.is_real()
]


class Scene:
    """One cell: the server before, the fault, and what came of it."""

    def __init__(self, faults: FaultServer, cell: Cell) -> None:
        self.faults, self.server, self.cell = faults, faults.server, cell
        self.before = faults.settle()
        self.text = self.server.complete(PROMPT, SHORT)
        self.trace = faults.trace()
        self.streams: list[Any] = []
        self.fault_s = 0.0
        self.told: dict[str, str] = {}  # one row of the table, for who reads the output

    def note(self, **figures: object) -> None:
        self.told |= {name: str(value) for name, value in figures.items()}

    def since_fault(self) -> str:
        return f"{time.monotonic() - self.fault_s:.1f} s"

    def strike(self) -> None:
        """Gives the order where the phase is sure to come next, and waits until it is obeyed."""
        cell, server = self.cell, self.server
        if cell.phase == "decode":
            length = LONG if cell.ends_gang else ANSWER
            self.streams = [server.stream(PROMPT, length).wait_events(3) for _ in range(2)]
        is_coordinators = cell.target == COORDINATOR
        pid = self.trace.coordinator if is_coordinators else 0
        self.faults.order(Order(cell.act, cell.phase, cell.rank, pid, is_coordinators))
        if cell.phase == "prefill":
            self.streams = [server.stream(f"{time.time()} {PROMPT}", 20)]
        if cell.phase == "load":
            server.kill_rank(1)
        self.faults.wait_obeyed()
        self.fault_s = time.monotonic()
        if cell.act == "stuck" and cell.phase == "idle":  # shows as soon as there is work
            self.streams = [server.stream(PROMPT, 20)]

    def check_streams(self) -> None:
        for stream in self.streams:
            stream.join()
        assert time.monotonic() - self.fault_s < self.cell.limit_s + SLACK_S
        for stream in self.streams:
            error = stream.error or stream.refusal
            self.note(client=f"{error['code']} after {self.since_fault()}")
            assert error["code"] == "rank_failure"
            assert not stream.ended_well
            if stream.status_code != 200:
                assert stream.status_code == 503
                assert not stream.events

    def check_unready(self) -> None:
        """Until the next life serves nobody is told that it does."""
        self.server.until("the end of the gang", self.is_down)
        took_s = time.monotonic() - self.fault_s
        assert took_s < self.cell.limit_s + SLACK_S, took_s
        assert self.server.get("/health").status_code == 200
        refused = self.server.http.post("/v1/completions", json=self.server.body(PROMPT, 4))
        if refused.status_code != 200:  # else the next life has come between the two questions
            assert refused.status_code == 503
            assert refused.headers["retry-after"]

    def is_down(self) -> bool:
        return self.server.get("/ready").status_code == 503 or self.is_next()

    def is_next(self) -> bool:
        return self.server.status().get("epoch", 0) > self.before["epoch"]

    def check_failure(self, after: dict[str, Any]) -> None:
        lives = 2 if self.cell.phase == "load" else 1
        assert after["epoch"] == self.before["epoch"] + lives
        assert after["restarts"] == self.before["restarts"] + lives
        failure = after["last_failure"]
        keys = ("rank", "phase", "step")
        self.note(**{key: failure[key] for key in keys}, log_lines=len(failure["log_tail"]))
        self.note(message=failure["message"][:160])
        assert failure["epoch"] == after["epoch"] - 1
        assert failure["rank"] == self.cell.rank, failure
        assert failure["phase"], failure
        words = "on purpose" if self.cell.act == "raise" else f"rank {self.cell.rank} of {RANKS}: "
        assert any(words in line for line in failure["log_tail"]), failure

    def check_same(self) -> None:
        self.note(ready_again=self.since_fault())
        assert self.server.complete(PROMPT, SHORT) == self.text
        self.faults.settle()
        print("cell", self.cell.act, self.cell.phase, self.cell.target, self.told)

    def check_nothing_left(self) -> None:
        before, server = self.trace, self.server
        server.until(
            "the end of the old ranks",
            lambda: not any(os.path.exists(f"/proc/{pid}") for pid in before.rank_pids),
        )
        server.until("chips", lambda: self.faults.trace().free_chips == before.free_chips)
        now: Trace = self.faults.trace()
        new = now.segments - before.segments
        assert not [n for n in new if any(str(pid) in n for pid in before.rank_pids)]
        if now.coordinator == before.coordinator:
            assert now.descriptors <= before.descriptors + 8
        else:
            assert not os.path.exists(f"/proc/{before.coordinator}")


@pytest.mark.timeout(700)
@pytest.mark.parametrize("cell", CELLS)
def test_a_fault_ends_as_the_table_says(fault_server: FaultServer, cell: Cell) -> None:
    if cell.act == "nan":
        check_nan(Scene(fault_server, cell))
    elif cell.act == "slow":
        check_slow(Scene(fault_server, cell))
    elif cell.target == COORDINATOR:
        check_coordinator(Scene(fault_server, cell))
    else:
        check_gang(Scene(fault_server, cell))


def test_the_first_event_does_not_wait_for_the_second_step(fault_server: FaultServer) -> None:
    server = fault_server.server
    fault_server.settle()
    text = server.complete(PROMPT, SHORT)
    fault_server.order(Order("hold", "decode", 0))
    stream = server.stream(PROMPT, SHORT).wait_events(1)
    assert stream.error is None
    assert stream.text
    assert text.startswith(stream.text)
    fault_server.wait_obeyed()
    assert len(stream.events) == 1, "no second step was made"
    fault_server.go_ahead()
    assert stream.join().ended_well
    assert stream.text == text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_ingress_that_stands_still_is_replaced(fault_server: FaultServer) -> None:
    server = fault_server.server
    fault_server.settle()
    before, text = server.status(), server.complete(PROMPT, SHORT)
    pid = replica_pid(fault_server.app, "Ingress")
    os.kill(pid, signal.SIGSTOP)
    server.until("the end of the ingress", lambda: not os.path.exists(f"/proc/{pid}"))
    assert server.complete(PROMPT, SHORT) == text
    assert server.status()["epoch"] == before["epoch"]


def check_gang(scene: Scene) -> None:
    scene.strike()
    scene.check_streams()
    scene.check_unready()
    after = scene.server.wait_ready()
    scene.server.until("the next life", scene.is_next)
    after = scene.server.wait_ready()
    scene.check_failure(after)
    scene.check_same()
    scene.check_nothing_left()


def check_nan(scene: Scene) -> None:
    """The request whose logits they are ends with an error; its neighbours and the gang go on."""
    whole = scene.server.complete(PROMPT, ANSWER) if scene.cell.phase == "decode" else ""
    scene.strike()
    ends = [stream.join() for stream in scene.streams]
    errors = [stream.error or stream.refusal for stream in ends]
    assert [e["code"] for e in errors if e] == ["non_finite"]
    for stream, error in zip(ends, errors, strict=True):
        if error is None:
            assert stream.ended_well
            assert stream.text == whole
    assert scene.server.status()["epoch"] == scene.before["epoch"]
    scene.check_same()


def check_slow(scene: Scene) -> None:
    """Late, right, and no restart."""
    whole = scene.server.complete(PROMPT, ANSWER) if scene.cell.phase == "decode" else ""
    scene.strike()
    for stream in scene.streams:
        assert stream.join().ended_well
        assert not whole or stream.text == whole
    after = scene.server.wait_ready()
    lives = 1 if scene.cell.phase == "load" else 0
    assert after["epoch"] == scene.before["epoch"] + lives
    scene.check_same()


def check_coordinator(scene: Scene) -> None:
    """Its ranks end with it; Serve replaces it, and with it the counts of restarts."""
    scene.strike()
    for stream in scene.streams:
        error = (stream.join().error or stream.refusal)["code"]
        scene.note(client=f"{error} after {scene.since_fault()}")
        assert error in ("rank_failure", "not_ready")
    assert time.monotonic() - scene.fault_s < HUNG_S + SLACK_S
    scene.server.until("another coordinator", lambda: scene.faults.is_replaced(scene.trace))
    after = scene.server.wait_ready()
    assert after["epoch"] == 1
    assert {rank["pid"] for rank in after["ranks"]}.isdisjoint(scene.trace.rank_pids)
    scene.check_same()
    scene.check_nothing_left()
