"""`nrank serve` as a process: ready line, drain on SIGTERM, a taken port, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.front import ROOT, session_processes

pytestmark = pytest.mark.ray


def test_it_serves_drains_on_sigterm_and_leaves_no_process(front, own_token, open_stream):
    one = front("--port", "0")
    base_url = one.read_to("ready: ").partition("ready: ")[2].removesuffix("/v1")
    assert any(str(own_token) in line for line in one.lines), "the token file is named"
    assert any("dashboard http://" in line for line in one.lines)
    stream = open_stream(base_url, 100).wait_events(2)
    one.process.send_signal(signal.SIGTERM)
    stream.join()
    assert stream.ended_well
    assert len(stream.events) > 2
    assert one.finish() == 0
    assert "nrank: drained" in one.lines
    ours = (b"ray::RankWorker", b"ray::ServeReplica", b"ray::ServeController", b"ray::ProxyActor")
    assert session_processes(own_token, ours) == []


@pytest.mark.slow
def test_a_hangup_drains_like_sigterm(front, own_token, open_stream):
    one = front("--port", "0")
    base_url = one.read_to("ready: ").partition("ready: ")[2].removesuffix("/v1")
    stream = open_stream(base_url, 60).wait_events(2)
    one.process.send_signal(signal.SIGHUP)
    assert stream.join().ended_well
    assert one.finish() == 0
    assert "nrank: drained" in one.lines


@pytest.mark.slow  # test_foreground.py has the order of the end without a process
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_drain_at_once(front, own_token, open_stream, second):
    one = front("--port", "0")
    base_url = one.read_to("ready: ").partition("ready: ")[2].removesuffix("/v1")
    stream = open_stream(base_url, 20_000).wait_events(2)
    one.process.send_signal(signal.SIGTERM)
    one.read_to("draining")
    one.process.send_signal(second)
    assert one.finish() == 130
    assert one.lines[-1] == f"nrank: {second.name} again: ending without waiting"
    stream.join()
    assert not stream.ended_well, "the drain would have waited for it"
    assert session_processes(own_token, (b"ray::",)) == []


@pytest.mark.slow
def test_sigint_before_it_is_ready_ends_with_130(front, own_token):
    one = front("--port", "0")
    one.read_to("starting Ray")
    one.process.send_signal(signal.SIGINT)
    assert one.finish() == 130
    assert session_processes(own_token, (b"ray::",)) == []


def test_a_taken_port_is_named_and_nothing_is_started(front, own_token):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one = front("--port", str(port))
        assert one.finish() == 2
    assert len(one.lines) == 1
    assert f"port {port} on 127.0.0.1 can't be used" in one.lines[0]
    assert session_processes(own_token, (b"ray::",)) == []


@pytest.mark.slow
def test_the_smoke_job_runs_under_ray_job_submit(front, own_token):
    one = front("--port", "0")
    base_url = one.read_to("ready: ").partition("ready: ")[2]
    dashboard = next(line for line in one.lines if "dashboard http://" in line)
    address = dashboard.partition("dashboard ")[2].partition(",")[0]
    ray = Path(sys.executable).with_name("ray")
    command = [
        *(str(ray), "job", "submit", "--address", address, "--working-dir", str(ROOT), "--"),
        *("python", "-m", "deploy.smoke_job", "--base-url", base_url),
    ]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"completion_tokens": 8' in done.stdout
