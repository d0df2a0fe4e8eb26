"""The lives of a gang: start, serve, end, and start again with back-off and a cap.

Owns the restart policy. Knows no admission and no HTTP; tells a listener when a life ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cluster.failure import FATAL, Failure
from cluster.gang import Gang, Launcher
from cluster.session import GangListener, Session
from placement.config import EngineConfig
from placement.errors import NrankError

logger = logging.getLogger("nrank.supervisor")

BACKOFF_CAP_S = 60.0


@dataclass(frozen=True)
class RestartPolicy:
    """At most `limit` restarts in a row; a gang that served for `steady_s` starts a new row."""

    limit: int = 3
    backoff_s: float = 1.0  # doubles with each restart of a row
    steady_s: float = 600.0

    def delay_s(self, restart: int) -> float:
        """Wait before restart number `restart`, counted from 1."""
        return float(min(self.backoff_s * 2 ** (restart - 1), BACKOFF_CAP_S))


class Supervisor:
    """run() is the whole life of the service; `session` is the gang at work, if any."""

    def __init__(
        self,
        config: EngineConfig,
        make_launcher: Callable[[], Launcher],
        policy: RestartPolicy,
        listener: GangListener,
        snapshot_interval_s: float = 1.0,
    ) -> None:
        self._config = config
        self._make_launcher = make_launcher
        self._policy = policy
        self._listener = listener
        self._interval_s = snapshot_interval_s
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._held = False
        self._row = 0  # restarts that count against the cap
        self.gang: Gang | None = None
        self.session: Session | None = None
        self.phase = "starting"
        self.cause: NrankError | None = None  # of the last end, until the gang is ready again
        self.last_failure: Failure | None = None
        self.epoch = 0  # lives begun
        self.restarts = 0  # decided on, the one that is waited for included
        self.failed = False  # no further restart will be made
        self.fatal: NrankError | None = None  # why, when it is the user's to mend

    @property
    def ready(self) -> bool:
        return self.session is not None and self.session.ready.is_set()

    @property
    def reason(self) -> str:
        return str(self.cause) if self.cause is not None else ""

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def check(self) -> None:
        """Raises when supervision itself ended by a fault, so that a replica is replaced."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    def hold(self, held: bool) -> None:
        """While held, new requests wait here, in this life and the next ones."""
        self._held = held
        if self.session is not None:
            self.session.outbox.hold(held)

    async def stop(self) -> None:
        """Ends the gang, softly if it serves; returns when its ranks are gone."""
        self._stopping = True
        if self._task is None:
            return
        if self.ready and self.session is not None:
            try:
                await self.session.stop(self._config.step_timeout_s)
            except NrankError as error:
                logger.warning("the ranks did not stop when asked and are killed: %s", error)
                self._task.cancel()
        else:
            self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        while not self._stopping:
            try:
                await self._live()
            except NrankError as error:
                if self._stopping or not await self._recover(error):
                    return

    async def _live(self) -> None:
        """One life: returns when stopped, raises when it failed; nothing is left either way."""
        self.epoch += 1
        gang = self.gang = Gang(
            self._make_launcher(), self._config, lambda: self._listener.order().slows_loads
        )
        begun_s = time.monotonic()
        failure: NrankError | None = None
        try:
            await gang.start(self._enter, partial(self._listener.on_load, self.epoch))
            session = self.session = Session(
                gang, self._config, self.epoch, self._listener, self._interval_s, self._served
            )
            session.outbox.hold(self._held)
            await session.run()
        except NrankError as error:
            failure = self.cause = error
            identities = [rank.identity for rank in gang.ranks]
            self.last_failure = Failure.of(error, self.epoch, identities)
            if self.ready and time.monotonic() - begun_s > self._policy.steady_s:
                self._row = 0
            raise
        except Exception as error:  # a fault of ours: check() tells it, and Serve replaces us
            failure = self.cause = NrankError(
                f"supervision failed: {type(error).__name__}: {error}"
            )
            logger.exception("gang %d: supervision failed", self.epoch)
            raise
        finally:
            self.session = None
            self._enter("ending")
            self._listener.on_end(failure)
            await gang.end()

    def _enter(self, phase: str) -> None:
        self.phase = phase
        logger.info("gang %d: %s", self.epoch, phase)

    def _served(self) -> None:
        self.cause = None
        self._enter("running")
        assert self.session is not None
        self._listener.on_ready(self.session.snapshots)

    async def _recover(self, error: NrankError) -> bool:
        """Waits for the next start; False when there will be none."""
        self._row += 1
        if isinstance(error, FATAL) or self._row > self._policy.limit:
            self.failed = True
            self.fatal = error if isinstance(error, FATAL) else None
            self._enter("failed")
            logger.error("gang %d failed for good: %s", self.epoch, error)
            return False
        self.restarts += 1
        delay_s = self._policy.delay_s(self._row)
        self._listener.on_restart(error)
        self._enter("restarting")
        logger.warning(
            "gang %d failed: %s; restart %d of %d in %g s",
            self.epoch, error, self._row, self._policy.limit, delay_s,
        )  # fmt: skip
        await asyncio.sleep(delay_s)
        return True
