"""`nrank eval gpqa` against the served embedded model, and as a Ray job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy import cli
from deploy.gpqa import make_questions
from deploy.gpqa.ledger import read_ledger
from deploy.gpqa.records import Answer
from deploy.gpqa.report import make_report

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
COUNT = 20
MAX_TOKENS = 128
LIMIT_S = 240


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "questions.csv"
    assert make_questions.main(["--count", str(COUNT), "--seed", "1", "--out", str(path)]) == 0
    return path


def test_the_embedded_model_answers_every_question(healthy, data, tmp_path, capsys):
    """More at a time than the server takes: some are told to come again, and none is lost."""
    flags = [
        *("--base-url", healthy.base_url, "--data", str(data), "--out", str(tmp_path / "run")),
        *("--concurrency", "8", "--max-tokens", str(MAX_TOKENS), "--metrics-port", "0"),
    ]
    assert cli.main(["eval", "gpqa", *flags]) == 0
    contents = read_ledger(tmp_path / "run")
    answers = [record for record in contents.records if isinstance(record, Answer)]
    assert len({answer.id for answer in answers}) == len(answers) == COUNT
    assert contents.header.plan_id == healthy.status()["plan_id"]
    assert max(answer.waited_s for answer in answers) > 0
    assert all(0 < answer.completion_tokens <= MAX_TOKENS for answer in answers)
    assert all(answer.ttft_s > 0 for answer in answers)
    report = make_report(contents)
    assert report.drafts.acceptance is not None
    assert report.drafts.acceptance > 0.3
    assert report.states["no_answer"] + report.states["truncated"] < COUNT // 4  # it was taught how
    assert "all 20 questions" in capsys.readouterr().out


@pytest.mark.slow
def test_a_ray_job_succeeds_or_fails_as_the_evaluation_does(front, own_token, data, tmp_path):
    one = front("--port", "0")
    base_url = one.read_to("ready: ").partition("ready: ")[2]
    dashboard = next(line for line in one.lines if "dashboard http://" in line)
    address = dashboard.partition("dashboard ")[2].partition(",")[0]

    def submit(
        url: str, questions: Path, out: str = "run", meanwhile: Callable[[], None] = lambda: None
    ) -> subprocess.CompletedProcess[str]:
        command = [
            *(str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", address),
            *("--working-dir", str(ROOT), "--", "python", "-m", "deploy.gpqa"),
            *("--base-url", url, "--data", str(questions), "--out", str(tmp_path / out)),
            *("--max-tokens", str(MAX_TOKENS), "--metrics-port", "0"),
        ]
        environment = {**os.environ, "RAY_AUTH_MODE": "token"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as job:
            meanwhile()
            told = job.communicate(timeout=LIMIT_S)
        return subprocess.CompletedProcess(command, job.returncode, *told)

    good = submit(base_url, data)
    assert good.returncode == 0, good.stdout + good.stderr
    assert "succeeded" in good.stdout
    assert "all 20 questions" in good.stdout
    assert json.loads((tmp_path / "run" / "report.json").read_text())["complete"]
    dead = submit("http://127.0.0.1:1", data)
    assert dead.returncode != 0
    assert "doesn't answer (ConnectError)" in dead.stdout
    assert "failed" in dead.stdout
    bad = tmp_path / "bad.csv"
    bad.write_text("Question\nq\n")
    wrong = submit(base_url, bad)
    assert wrong.returncode != 0
    assert "no column 'Correct Answer'" in wrong.stdout
    many = tmp_path / "many.csv"
    assert make_questions.main(["--count", "400", "--seed", "2", "--out", str(many)]) == 0
    stopped = submit(base_url, many, "cut", lambda: interrupt(tmp_path / "cut"))
    assert stopped.returncode != 0
    assert "failed" in stopped.stdout
    assert "Traceback" not in stopped.stdout + stopped.stderr
    assert 5 <= len(read_ledger(tmp_path / "cut").records) < 400


def interrupt(folder: Path) -> None:
    """SIGINT to the evaluation that writes there, once it has some answers."""
    ledger, deadline_s = folder / "ledger.jsonl", time.monotonic() + LIMIT_S
    while not ledger.exists() or len(ledger.read_bytes().splitlines()) < 6:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_python = words[0].endswith(b"python") and words[1:3] == [b"-m", b"deploy.gpqa"]
        if is_python and str(folder).encode() in words:
            os.kill(int(process.name), signal.SIGINT)
            return
    raise AssertionError("no process evaluates")
