"""`nrank serve`: everything checked, Ray up, the application served, until a signal; then drained.

Owns the order of start and end and what the user reads meanwhile. Leaves no process behind,
whichever way it ends.
"""

from __future__ import annotations

import signal
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import LoggingConfig

from cluster.client import EngineState, EngineStatus, NotServing, RankStatus
from cluster.ray_coordinator import TRANSPORT, plan_of
from cluster.ray_gang import check_resources
from cluster.ray_ingress import check_edge
from deploy import local_ray
from deploy.config import ServeConfig
from deploy.load_display import LoadDisplay, LoadLines, is_terminal
from deploy.serve import admin_gate, application, resource_of
from deploy.signals import TICK_S, Interrupted, SignalFlag
from placement.errors import ConfigError, RankError
from placement.evidence import read_evidence
from placement.plan import Plan
from rank_worker.messages import LoadProgress

APP = "nrank"
ASK_S = 15.0
POLL_S = 0.5
WATCH_S = 2.0
HTTP_S = 30.0
JOBS_S = 10.0
NO_JOBS = (
    "jobs can't be submitted to this Ray: its agent is not up; "
    f"port {local_ray.AGENT_PORT} may belong to another Ray on this machine"
)
INTERRUPTED = 130
BEFORE = "before it was ready: ending"


class Foreground:
    """One run of the command. `say` prints a line at once: others wait for it."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._resource = resource_of(config)
        self._flag = SignalFlag()
        self._told = ""
        self._reported = 0  # the gang whose start was told
        self._load: LoadDisplay | LoadLines
        self._load = LoadDisplay(sys.stderr) if is_terminal(sys.stderr) else LoadLines(say)

    def run(self) -> int:
        """0 after a clean end, 130 for SIGINT before it was ready. Raises NrankError.

        A second signal ends a drain at once: 130.
        """
        port = local_ray.check_port(self._config.host, self._config.port)
        self._config = self._config.model_copy(update={"port": port})
        plan = plan_of(self._config.engine())
        self._check_chips()
        admin_gate(self._config)
        if self._config.evidence_file:
            read_evidence(self._config.evidence_file)
        check_edge(self._config.model, self._config.model_name, self._config.context_tokens)
        connection = local_ray.RayConnection(self._config.ray_address, self._resources())
        at_once = False
        with self._flag as flag:
            try:
                return self._serve(plan, connection)
            except Interrupted as interrupted:
                at_once = flag.is_serving
                return self._interrupted(interrupted)
            finally:
                flag.shield()
                if not at_once:
                    connection.end(APP)
                    flag.settle()
                connection.close(APP)

    def _interrupted(self, interrupted: Interrupted) -> int:
        """Nothing to drain before it was ready; a second signal ends a drain."""
        again = self._flag.is_serving
        say(f"{interrupted} {'again: ending without waiting' if again else BEFORE}")
        return INTERRUPTED if again or interrupted.signum == signal.SIGINT else 0

    def _check_chips(self) -> None:
        chips, ranks = self._config.chips, self._config.ranks
        if 0 < chips < ranks:
            raise ConfigError(f"ranks = {ranks}, but chips = {chips}: each rank needs one chip")

    def _resources(self) -> dict[str, float]:
        """What a local Ray is told that it has; chips of its own kinds it finds itself."""
        if self._resource in ("GPU", "NPU"):
            return {}
        return {self._resource: float(self._config.chips or self._config.ranks)}

    def _serve(self, plan: Plan, connection: local_ray.RayConnection) -> int:
        config, flag = self._config, self._flag
        say(f"model {config.model_name}: {config.ranks} rank(s) on {config.device}")
        say(f"config {config.config_hash}, plan {plan.plan_id}")
        say(f"connecting to Ray at {config.ray_address}" if config.ray_address else "starting Ray")
        jobs = not config.ray_address and local_ray.agent_port_free()
        dashboard = connection.open(flag.check)
        flag.take_over()
        check_resources(self._resource, config.ranks)
        handle = flag.apart(self._deploy)
        self._wait_ready(handle)
        if not config.ray_address and not (jobs and self._wait_jobs()):
            say(NO_JOBS)
        flag.serving()
        base = f"http://{bracketed(config.host)}:{config.port}"
        say(f"dashboard {dashboard or 'off'}, token {local_ray.token_place()}")
        say(f"ready: {base}/v1")
        self._watch(handle)
        say(f"draining, up to {config.drain_timeout_s:g} s")
        self._drain(handle)
        return 0

    def _deploy(self) -> Any:
        config, quiet = self._config, LoggingConfig(log_level="WARNING", enable_access_log=False)
        http = HTTPOptions(host=config.host, port=config.port, request_timeout_s=None)
        serve.start(ProxyLocation.HeadOnly, http, logging_config=quiet)
        serve.run(application(config), name=APP, route_prefix="/", logging_config=quiet)
        return serve.get_deployment_handle("Coordinator", APP)

    def _wait_ready(self, handle: Any) -> None:
        """Until the gang has made a step and the port answers; RankError when it never will."""
        try:
            self._wait_gang(handle)
        finally:
            self._load.clear()
        deadline_s = time.monotonic() + HTTP_S
        while not answers(f"http://{reachable(self._config.host)}:{self._config.port}/ready"):
            if time.monotonic() > deadline_s:
                raise RankError(f"port {self._config.port} did not answer within {HTTP_S:g} s")
            self._flag.wait(POLL_S)

    def _wait_gang(self, handle: Any) -> None:
        while True:
            status = self._status(handle)
            if status is not None:
                self._tell(status)
                if status.state is EngineState.FAILED:
                    raise RankError(f"the gang can't be started: {status.reason}")
                if status.ready:
                    return
            self._flag.wait(POLL_S)

    def _wait_jobs(self) -> bool:
        """Until `ray job submit` will be answered; False when that doesn't come."""
        deadline_s = time.monotonic() + JOBS_S
        while not local_ray.takes_jobs():
            if time.monotonic() > deadline_s:
                return False
            self._flag.wait(POLL_S)
        return True

    def _watch(self, handle: Any) -> None:
        """Until a signal: tells what changes. RankError when no gang will be started again."""
        while not self._flag.wait(WATCH_S):
            status = self._status(handle)
            if status is not None:
                self._tell(status)
                if status.state is EngineState.FAILED:
                    raise RankError(f"the gang failed for good: {status.reason}")

    def _status(self, handle: Any) -> EngineStatus | None:
        """None while the coordinator itself is being replaced."""
        try:
            return self._result(handle.status.remote(), ASK_S)  # type: ignore[no-any-return]
        except (*TRANSPORT, NotServing, TimeoutError):
            return None

    def _tell(self, status: EngineStatus) -> None:
        """What is new: the state, how far ranks have loaded, and once a gang the start's report."""
        text = f"gang {status.epoch}: {status.state}"
        if status.reason:
            text += f" ({status.reason})"
        if text != self._told:
            self._told = text
            self._say(text)
        if status.slowest_rank >= 0:
            self._load.update([_progress(rank) for rank in status.ranks])
        if status.start is not None and status.epoch != self._reported:
            self._reported = status.epoch
            for line in status.start.lines():
                self._say(line)
            self._say(context_text(status))

    def _say(self, text: str) -> None:
        self._load.clear()
        say(text)

    def _drain(self, handle: Any) -> None:
        timeout_s = self._config.drain_timeout_s + ASK_S
        try:
            finished = self._result(handle.drain.remote(), timeout_s)
            self._result(handle.close.remote(), self._config.step_timeout_s + ASK_S)
        except (*TRANSPORT, TimeoutError) as error:
            say(f"the coordinator did not drain ({type(error).__name__}); ending it")
            return
        say("drained" if finished else "drain timeout: open requests were ended with an error")

    def _result(self, response: Any, timeout_s: float) -> Any:
        """Of a call to the coordinator, in waits short enough for a signal to be seen."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._flag.check()
            left_s = deadline_s - time.monotonic()
            try:
                return response.result(timeout_s=max(0.0, min(TICK_S, left_s)))
            except TimeoutError:
                if left_s <= TICK_S:
                    raise


def context_text(status: EngineStatus) -> str:
    """The three lengths: asked for, with room, and run to its end."""
    text = (
        f"context: {status.configured_tokens} tokens configured, {status.allocated_tokens} "
        f"allocated, {status.certified_tokens} certified"
    )
    return f"{text} ({status.certified_warning})" if status.certified_warning else text


def say(text: str) -> None:
    print(f"nrank: {text}", flush=True)


def _progress(rank: RankStatus) -> LoadProgress:
    read, planned = rank.weights_read_bytes, rank.weights_planned_bytes
    return LoadProgress(rank.rank, rank.phase, read, planned, rank.load_seconds)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def reachable(host: str) -> str:
    """An address on which this machine reaches a server that listens on `host`."""
    return bracketed({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host))


def answers(url: str) -> bool:
    """Asked without the proxy that `http_proxy` may name: the server is our own."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=ASK_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
