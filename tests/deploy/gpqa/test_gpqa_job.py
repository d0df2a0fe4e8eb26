"""The job as a process: killed and resumed, interrupted, and how it ends when it can't work."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from deploy import cli, eval_command
from deploy.gpqa.records import Answer, End, Session
from tests.deploy.gpqa.conftest import COUNT, Run

ROOT = Path(__file__).parents[3]
KILLS = 10
LIMIT_S = 120


def start(run: Run, *more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.gpqa", *run.arguments(*more)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_ten_kills_lose_nothing_and_repeat_nothing(run: Run) -> None:
    """Each process is killed while it waits for the answer to its n-th question."""
    generator = random.Random(11)
    job: list[subprocess.Popen[str]] = []
    left = [0]  # questions that this process may still ask

    def before(number: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            job[-1].kill()
            job[-1].wait(LIMIT_S)

    run.server.before = before
    answered = set[str]()
    for _ in range(KILLS):
        left[0] = generator.randint(1, 3)
        job.append(start(run, "--concurrency", 2))
        job[-1].communicate(timeout=LIMIT_S)
        assert job[-1].returncode == -signal.SIGKILL
        if (run.folder / "ledger.jsonl").exists():
            kept = {record.id for record in run.ledger.records if isinstance(record, Answer)}
            assert answered <= kept
            answered = kept
    run.server.before = lambda _: None
    job.append(start(run, "--concurrency", 2))
    out, err = job[-1].communicate(timeout=LIMIT_S)
    assert job[-1].returncode == 0, err
    assert "20/20 = 100.0 %" in out
    records = run.ledger.records
    counts = Counter(record.id for record in records if isinstance(record, Answer))
    assert counts == {question.id: 1 for question in run.server.questions}
    assert sum(isinstance(record, Session) for record in records) == KILLS + 1
    assert [record.how for record in records if isinstance(record, End)] == ["done"]
    # Asked again is only what was under way in a process that was killed.
    assert len(run.server.asked) <= COUNT + 2 * KILLS


def test_a_process_that_is_interrupted_ends_with_130(run: Run) -> None:
    job = []
    release = threading.Event()

    def before(number: int) -> None:
        if number == 4:
            job[0].send_signal(signal.SIGINT)
            release.wait(LIMIT_S)

    run.server.before = before
    job.append(start(run, "--concurrency", 1))
    out, err = job[0].communicate(timeout=LIMIT_S)
    release.set()
    assert (job[0].returncode, out) == (130, "")
    assert err.splitlines()[-2:] == [
        "nrank: the same command resumes the run",
        "nrank: interrupted",
    ]


@pytest.mark.parametrize("part", ["header", "address"])
def test_a_job_that_cannot_begin_says_why_in_one_line(run: Run, part: str) -> None:
    if part == "header":
        run.data.write_text("Question,Answer\n")
    more = ["--base-url", "http://127.0.0.1:1"] if part == "address" else []
    job = start(run, *more)
    out, err = job.communicate(timeout=LIMIT_S)
    assert (job.returncode, out) == ({"header": 2, "address": 1}[part], "")
    assert err.count("\n") == 1
    assert {"header": "no column 'Correct Answer'", "address": "ConnectError"}[part] in err


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "http://h:x", "http://["]
)
def test_an_address_that_is_none_is_bad_input(run: Run, url: str) -> None:
    assert run("--base-url", url) == 2
    assert run.err.startswith(f"nrank: --base-url {url} is no address")


def test_an_address_with_a_password_is_not_repeated(run: Run) -> None:
    assert run("--base-url", "http://me:hush@host:1/v1") == 2
    assert "holds a name or password" in run.err
    assert "hush" not in run.err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--temperature", "3"], "3 is not within 0 and 2"),
        (["--temperature", "nan"], "nan is not within"),
        (["--top-p", "x"], "'x' is no number"),
        (["--concurrency", "0"], "0 is below 1"),
        (["--concurrency", "5000"], "5000 is not within 1 and 4096"),
        (["--seed", str(2**64)], f"{2**64} is not within 0 and {2**64 - 1}"),
        (["--max-tokens", str(2**64)], "is not within 1 and 2147483647"),
        (["--preset", "none"], "invalid choice"),
    ],
)
def test_flags_out_of_bounds_are_bad_input(run: Run, flags: list[str], told: str) -> None:
    assert run(*flags) == 2
    assert told in run.err
    assert run.err.count("\n") == 1


def test_a_ledger_in_a_jobs_own_copy_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "runtime_resources" / eval_command.JOB_COPY / "_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    run.folder = Path("run")
    assert run() == 2
    assert "--out run would lie in the job's own copy of the directory" in run.err


@pytest.mark.parametrize("kind", ["gpqa", "report"])
def test_each_kind_helps_with_an_example(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", kind, "--help"])
    assert end.value.code == 0
    assert f"example: nrank eval {kind} " in capsys.readouterr().out


def test_the_command_starts_without_torch_and_ray(run: Run) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'ray', 'transformers')));"
        "from deploy.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "eval", "gpqa", *run.arguments("--limit", 1)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
