"""A served gang of faulty ranks, and what is looked at before and after a fault."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.serve.faulty_rank import FaultyFactory, Order, go_ahead, handed_on

RANKS = 2
STEP_TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 20.0
OVERRIDES = {
    "ranks": RANKS,
    "resource_name": "NPU",
    "max_sequences": 4,
    "max_queue_requests": 16,
    "restart_backoff_s": 0.1,
    "restart_limit": 1000,
    "step_timeout_s": STEP_TIMEOUT_S,
    "load_timeout_s": LOAD_TIMEOUT_S,
    "check_interval_steps": 1,
}


def faulty_application(orders: Path, **overrides: Any) -> Any:
    """As `deploy.serve.application`, with ranks and a coordinator that obey orders."""
    from cluster.ingress import EdgeSettings
    from cluster.ray_coordinator import coordinator_deployment
    from cluster.ray_ingress import ingress_deployment
    from deploy.config import load_config
    from deploy.serve import resource_of, settings_of
    from tests.serve.faulty_coordinator import FaultyCoordinator

    config = load_config(overrides={**OVERRIDES, **overrides})
    coordinator = coordinator_deployment(
        config.engine(),
        settings_of(config),
        resource_of(config),
        FaultyFactory(str(orders)),
        FaultyCoordinator,
    )
    return ingress_deployment(
        coordinator,
        config.model,
        config.model_name,
        config.context_tokens,
        EdgeSettings(),
        config.ingress_replicas,
        config.drain_timeout_s,
    )


@dataclass(frozen=True)
class Trace:
    """What a gang and its coordinator hold outside of any request."""

    rank_pids: tuple[int, ...]
    coordinator: int
    descriptors: int  # of the coordinator
    free_chips: float
    segments: frozenset[str]


class FaultServer:
    """A server (see conftest) of faulty ranks."""

    def __init__(self, server: Any, orders: Path, app: str) -> None:
        self.server, self.orders, self.app = server, orders, app

    def settle(self) -> dict[str, Any]:
        """Ready, without requests, pages and slots, and with no order open."""
        for path in (self.orders, handed_on(self.orders), go_ahead(self.orders)):
            path.unlink(missing_ok=True)
        self.server.wait_ready()
        self.server.until("idleness", lambda: self.in_use() == (0, 0, 0, 0))
        self.server.until("one coordinator", self._is_single)
        return self.server.status()

    def _is_single(self) -> bool:
        return len(replica_pids(self.app, "Coordinator")) == 1

    def in_use(self) -> tuple[int, ...]:
        """Running, waiting, slots and pages, as rank 0 tells them; (-1,) while there is none."""
        snapshots = self.server.status().get("snapshots")
        if not snapshots:
            return (-1,)
        keys = ("running", "waiting", "slots_used", "pages_used")
        return tuple(snapshots[0][key] for key in keys)

    def order(self, order: Order) -> None:
        order.give(self.orders)

    def go_ahead(self) -> None:
        """For a rank that is on hold."""
        go_ahead(self.orders).touch()

    def wait_obeyed(self) -> None:
        paths = (self.orders, handed_on(self.orders))  # it may go from the first to the second
        self.server.until("obedience", lambda: not any(path.exists() for path in paths))

    def is_replaced(self, before: Trace) -> bool:
        """Whether another coordinator has another gang."""
        status = self.server.status()
        pids = {rank["pid"] for rank in status.get("ranks", ())}
        return status.get("ready") and pids.isdisjoint(before.rank_pids)

    def trace(self) -> Trace:
        import ray

        coordinator = replica_pid(self.app, "Coordinator")
        return Trace(
            tuple(rank["pid"] for rank in self.server.status()["ranks"]),
            coordinator,
            len(os.listdir(f"/proc/{coordinator}/fd")),
            ray.available_resources().get("NPU", 0.0),
            frozenset(os.listdir("/dev/shm")),
        )


def replica_pid(app: str, deployment: str) -> int:
    (pid,) = replica_pids(app, deployment)
    return pid


def replica_pids(app: str, deployment: str) -> list[int]:
    """Replicas of this session's Ray: other clusters may run on the machine."""
    ours = os.environ["RAY_AUTH_TOKEN_PATH"].encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            title = Path(f"/proc/{name}/cmdline").read_bytes()[:200]
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        is_replica = title.startswith(f"ray::ServeReplica:{app}:{deployment}".encode())
        if is_replica and ours in environment:
            found.append(int(name))
    return found
