"""Where Ray is and what it starts with: addresses that no Ray answers at, PATH of its jobs."""

from __future__ import annotations

import os
import shutil
import socket
import sys

import pytest

from deploy import cli
from deploy.local_ray import RayConnection, agent_port_free, check_address, search_path
from placement.errors import ConfigError, RankError


@pytest.fixture
def closed_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_ends_the_command_in_one_line(
    capsys: pytest.CaptureFixture[str], closed_port: int, scheme: str
) -> None:
    address = f"{scheme}127.0.0.1:{closed_port}"
    assert cli.main(["serve", "--port", "0", "--ray-address", address]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"nrank: no Ray answers at {address}: Connection refused")
    assert err.count("\n") == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "local", "host:", ":6379", "h:0", "h:99999"])
def test_what_is_no_address_is_refused_with_the_form(address: str) -> None:
    with pytest.raises(ConfigError, match="write host:port"):
        check_address(address)


def test_a_listener_that_is_no_ray_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.local_ray.JOIN_S", 0.4)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        connection = RayConnection(address, {})
        connection._thread = _Mute()
        with pytest.raises(ConfigError, match=f"no Ray answers at {address}: it took no driver"):
            connection.open(lambda: None)
        connection.end("nrank")
        connection.close("nrank")  # does not wait for it


def test_python_of_a_job_is_the_servers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    assert shutil.which("python", path=search_path()) == sys.executable
    monkeypatch.setenv("PATH", search_path())
    assert search_path() == os.environ["PATH"], "it does not grow"


def test_a_taken_port_of_rays_agent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        monkeypatch.setattr("deploy.local_ray.AGENT_PORT", other.getsockname()[1])
        other.listen()
        assert not agent_port_free()
    assert agent_port_free()


class _Mute:
    """Ray's start, as it hangs in a connection that nobody answers."""

    def start(self) -> None:
        pass

    def is_alive(self) -> bool:
        return True


def test_a_ray_that_does_not_start_is_told_in_one_short_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("a log\n" * 5000 + "no space left on device")

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(RankError) as caught:
        RayConnection("", {}).open(lambda: None)
    text = str(caught.value)
    assert text.startswith("a local Ray could not be started: ... ")
    assert text.endswith("no space left on device")
    assert len(text) < 600
