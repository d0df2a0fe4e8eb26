"""`nrank report`: what is packed, that no secret is, and what happens when parts are missing."""

from __future__ import annotations

import json
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy import cli, report_command, report_parts
from deploy.config import ServeConfig
from deploy.doctor.finding import Finding, Severity
from deploy.rank_logs import MAX_BYTES, find_rank_logs

PLANTED = "x1Y2z3W4v5U6t7"
SERVED = ServeConfig(decode_share=0.25, ray_address=f"ray://anna:{PLANTED}@head:10001")
POLL_S = 0.01  # how soon a server sees that it has to end
PID = 4242
HEAD = ":job_id:01000000\n:actor_name:RankWorker\n"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ray_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of /tmp for Ray's sessions, and findings that need no machine."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path))
    finding = Finding("a.b", Severity.WARNING, f"seen hf_{PLANTED}", remedy="none")
    monkeypatch.setattr(report_parts, "examine", lambda *_: [finding])
    return tmp_path / "tmp"


@pytest.fixture
def server() -> Iterator[Callable[[Any], str]]:
    """server(answer) -> base URL of a server whose /status is that."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Any) -> str:
        body = json.dumps(answer).encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/status" else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Tests print nothing."""

        made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=made.serve_forever, args=(POLL_S,), daemon=True).start()
        servers.append(made)
        return f"http://127.0.0.1:{made.server_address[1]}"

    yield start
    for made in servers:
        made.shutdown()
        made.server_close()


@pytest.fixture
def nrank(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def write_log(ray_temp: Path, session: str, pid: int, text: str, kind: str = "err") -> Path:
    folder = ray_temp / "ray" / session / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"worker-{pid:056x}-01000000-{pid}.{kind}"
    path.write_text(text)
    return path


def unpack(path: Path) -> dict[str, str]:
    files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            files[member.name.removeprefix("nrank-report/")] = file.read().decode()
    return files


def status_with_secrets() -> dict[str, Any]:
    tail = [f"Authorization: Bearer {PLANTED}", f"http://anna:{PLANTED}@host/", "rank 1 fell"]
    return {
        "state": "serving",
        "config_hash": SERVED.config_hash,
        "config": SERVED.resolved().model_dump(),
        "plan_id": "0123",
        "max_tokens": 64,
        "api_key": PLANTED,
        "prompt": PLANTED,
        "last_failure": {"message": f"token={PLANTED}", "rank": 1, "log_tail": tail},
        "ranks": [{"rank": 0, "pid": PID}, {"rank": 1, "pid": "odd"}, None],
    }


def test_no_planted_secret_is_in_any_byte_of_the_archive(
    nrank: Run,
    server: Callable[[Any], str],
    ray_temp: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HF_TOKEN", "RAY_AUTH_TOKEN", "NRANK_API_KEY", "NCCL_SECRET", "OMP_PASSWORD"):
        monkeypatch.setenv(name, f"{name.lower()}-{PLANTED}")
    monkeypatch.setenv("HF_ENDPOINT", f"https://anna:{PLANTED}@mirror")
    token = tmp_path / "token"
    token.write_text("token-of-the-file\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    log = (
        f"{HEAD}said token-of-the-file\n{{'prompt': 'I am {PLANTED}'}}\nhf_{PLANTED}\nfirst step\n"
    )
    write_log(ray_temp, "session_1", PID, log)
    config = tmp_path / "serve.yaml"
    config.write_text(f"ray_address: ray://anna:{PLANTED}@head:10001\n")
    url = server(status_with_secrets()).replace("//", f"//anna:{PLANTED}@")
    out = tmp_path / "report.tar.gz"
    for base in (server(status_with_secrets()), url):
        code, told, err = nrank("report", "--url", base, "--config", config, "--out", out)
        assert (code, told) == (0, f"{out}\n")
        files = unpack(out)
        for secret in (PLANTED, "token-of-the-file"):
            assert secret.encode() not in out.read_bytes()
            assert not [name for name, text in files.items() if secret in name + text]
            assert secret not in err
    assert "HF_TOKEN" in files["environment.json"]
    assert "first step" in next(text for name, text in files.items() if name.startswith("logs/"))


def test_a_report_of_a_running_server_has_everything(
    nrank: Run, server: Callable[[Any], str], ray_temp: Path, tmp_path: Path
) -> None:
    write_log(ray_temp, "session_1", PID, f"{HEAD}of the server\n")
    write_log(ray_temp, "session_1", 7, ":actor_name:ProxyActor\nno rank\n")
    write_log(ray_temp, "session_2", 8, f"{HEAD}of another server\n")
    out = tmp_path / "report.tar.gz"
    code, _, err = nrank("report", "--url", server(status_with_secrets()) + "/v1", "--out", out)
    assert (code, err) == (0, "")
    files = unpack(out)
    expected = {"status", "versions", "environment", "config", "plan", "doctor", "report"}
    assert {name for name in files if "/" not in name} == {f"{name}.json" for name in expected}
    told = {name: json.loads(files[f"{name}.json"]) for name in expected}
    assert told["status"]["max_tokens"] == 64
    assert told["status"]["last_failure"]["log_tail"][2] == "rank 1 fell"
    assert told["config"]["same_as_server"] is True
    assert told["config"]["config"]["decode_share"] == 0.25
    assert told["config"]["config"]["ranks"] == 2
    assert told["plan"]["server_plan_id"] == "0123"
    assert len(told["plan"]["ranks"]) == 2
    assert told["doctor"]["findings"][0]["id"] == "a.b"
    assert told["report"]["missing"] == {}
    assert {"torch", "tokenizers"} <= {p["name"] for p in told["versions"]["packages"]}
    logs = [text for name, text in files.items() if name.startswith("logs/")]
    assert logs == [f"{HEAD}of the server\n"]


def test_without_a_server_the_rest_is_packed_and_says_so(
    nrank: Run, ray_temp: Path, tmp_path: Path
) -> None:
    write_log(ray_temp, "session_1", 7, f"{HEAD}old\n")
    write_log(ray_temp, "session_2", 8, f"{HEAD}newest\n")
    out = tmp_path / "report.tar.gz"
    code, _, err = nrank("report", "--url", "http://127.0.0.1:1", "--out", out)
    assert code == 0
    assert err.startswith("nrank: report lacks status.json: http://127.0.0.1:1/status gave no")
    assert err.count("\n") == 1
    files = unpack(out)
    assert "status.json" in json.loads(files["report.json"])["missing"]
    assert json.loads(files["config.json"])["same_as_server"] is None
    assert [text for name, text in files.items() if name.startswith("logs/")] == [f"{HEAD}newest\n"]


@pytest.mark.parametrize(
    "answer", [[], "text", {"ranks": 3}, {"ranks": [{"pid": -1}]}, {"config": 7}, None]
)
def test_an_answer_that_is_no_status_is_packed_as_it_is(
    nrank: Run, server: Callable[[Any], str], ray_temp: Path, tmp_path: Path, answer: Any
) -> None:
    out = tmp_path / "report.tar.gz"
    assert nrank("report", "--url", server(answer), "--out", out)[0] == 0
    assert "status.json" in unpack(out)


def test_a_report_replaces_an_old_one_only_when_it_is_whole(
    nrank: Run, ray_temp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.tar.gz"
    out.write_text("old")

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = set(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr("placement.whole_file.os.fsync", full_disk)
        code, told, err = nrank("report", "--url", "http://127.0.0.1:1", "--out", out)
    assert (code, told, out.read_text()) == (2, "", "old")
    assert err.endswith("No space left on device; choose another place with --out\n")
    assert set(tmp_path.iterdir()) == before
    assert nrank("report", "--url", "http://127.0.0.1:1", "--out", out)[0] == 0
    assert out.stat().st_mode & 0o077 == 0
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--url", "localhost:8000"], "'localhost:8000' is no URL"),
        (["--url", "file:///etc/passwd"], "is no URL"),
        (["--out", "/no/where/x.tar.gz"], "/no/where/x.tar.gz"),
        (["--out", "/"], "is a folder"),
        (["--config", "/no/where.yaml"], "/no/where.yaml"),
        (["--model", "/no/where"], "/no/where is no model directory"),
    ],
)
def test_bad_input_of_a_report_is_one_line(nrank: Run, arguments: list[str], expected: str) -> None:
    code, out, err = nrank("report", *arguments)
    assert code == 2
    assert expected in err
    assert err.count("\n") == 1
    assert not out


def test_a_model_that_cannot_be_planned_leaves_the_rest(
    nrank: Run, ray_temp: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    out = tmp_path / "report.tar.gz"
    code, _, err = nrank("report", "--url", "http://127.0.0.1:1", "--model", model, "--out", out)
    assert code == 0
    assert "report lacks plan.json" in err
    assert "doctor.json" in unpack(out)


def test_the_end_of_a_long_log_begins_with_a_whole_line(ray_temp: Path) -> None:
    line = "hf_secret-with-its-name " + "x" * 50 + "\n"
    path = write_log(ray_temp, "session_1", PID, HEAD + line * (2 * MAX_BYTES // len(line)))
    (log,) = find_rank_logs({PID})
    assert log.name == f"session_1/{path.name}"
    assert len(log.text) <= MAX_BYTES
    assert set(log.text.splitlines(keepends=True)) == {line}


def test_what_is_no_log_is_passed_over(ray_temp: Path) -> None:
    path = write_log(ray_temp, "session_1", PID, HEAD)
    os.symlink("/etc/passwd", path.with_name(f"worker-{1:056x}-01000000-1.err"))
    os.mkfifo(path.with_name(f"worker-{2:056x}-01000000-2.err"))
    os.symlink("session_1", ray_temp / "ray" / "session_latest")
    assert [log.text for log in find_rank_logs(frozenset())] == [HEAD]


def test_the_file_has_a_name_of_its_own_by_default(
    nrank: Run, ray_temp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    code, told, _ = nrank("report", "--url", "http://127.0.0.1:1")
    assert code == 0
    assert [path.name for path in folder.iterdir()] == [told.strip()]
    assert report_command.DEFAULT_URL.endswith(str(ServeConfig().port))
