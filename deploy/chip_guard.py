"""The heat guard of a gang without Ray: sensors and guard in the launcher's process.

For `generate` and `bench` on chips. A cut is a rest like a hold: there is nobody to send an error.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from cluster.thermal_guard import HeatLimits, ThermalGuard
from placement.config import EngineConfig
from rank_worker.device import open_device
from rank_worker.device_sensors.poller import SensorPoller
from rank_worker.device_sensors.sources import open_poller
from rank_worker.guard_word import Order
from rank_worker.launch import Engine
from rank_worker.model import parameter_dtype

INTERVAL_S = 1.0


def guard_of(config: EngineConfig) -> Callable[[Engine], AbstractContextManager[object]]:
    """The guard on every device but the CPU."""
    return nullcontext if config.device == "cpu" else guarded


@contextmanager
def guarded(engine: Engine, sensors: Callable[[], SensorPoller] = open_poller) -> Iterator[None]:
    """While inside, `engine` rests when its chips are too hot, and says so on stderr.

    To be entered before the engine starts: loading heats most. Rank r runs on chip r.
    ConfigError or OSError when the node's processes can't meet. ConfigError for a device that is
    not here, before sensors are missed that nobody needs then.
    """
    config = engine.config  # rank 0 is of this process and begins just so
    open_device(config.device).begin(0, parameter_dtype(config.dtype))
    over, poller, guard = threading.Event(), sensors(), ThermalGuard(HeatLimits())

    def watch() -> None:
        told = Order.RUN
        while not over.is_set():
            verdict = guard.observe(poller.latest(), range(engine.config.ranks), time.monotonic())
            if verdict.order is not told:
                told = verdict.order
                engine.rank0.obey(told)
                text = f"at rest: {verdict.reason}" if told.is_still else f"order {told.name}"
                print(f"nrank: {text}", file=sys.stderr)
            over.wait(INTERVAL_S)

    thread = threading.Thread(target=watch, name="chip-guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        poller.close()
