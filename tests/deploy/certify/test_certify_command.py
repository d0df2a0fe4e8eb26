"""`nrank certify` as a command: exit codes, one-line errors, interrupts, and one real run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.tokens import Tokenizer
from deploy import cli
from placement.evidence import Pass, read_evidence
from tests.deploy.certify.scripted_gang import Script

SMALL = (
    "--ranks", "1", "--sequences", "2", "--context", "1024", "--lengths", "192,256",
    "--depths", "0,100", "--max-tokens", "48",
)  # fmt: skip
NUM_CELLS = 16
WAIT_S = 120.0
END = 4089  # of the embedded model's chat turns


@pytest.fixture
def script(embedded_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """What the command's gangs do; the prompts are the embedded model's."""
    tokenizer = Tokenizer.load(embedded_model_dir)
    script = Script(tokenizer.encode, tokenizer.decode, END)
    monkeypatch.setattr("deploy.certify.gangs.gang_starter", lambda *_: script.start)
    return script


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of the command on `tmp_path/evidence.json`."""

    def call(*flags: str) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = cli.main(["certify", *SMALL, "--out", str(tmp_path / "evidence.json"), *flags])
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def test_a_pass_is_0_and_a_failed_needle_is_1(run: Any, script: Script) -> None:
    code, out, err = run()
    assert (code, out.splitlines()[-1]) == (0, "certified: 256 tokens")
    assert err.splitlines()[-1].endswith("passed; 16/16 cells")
    script.faults = {(Pass.GRID, 256, 1): "wrong"}
    code, out, err = run("--overwrite")
    assert code == 1
    assert "grid 256 tokens, needle at 100 %, 0.5 s: FAILED: answered " in err
    assert out.splitlines()[-1] == ("certified: 192 tokens; grid at 256 tokens failed")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--lengths", "0"), "0 is below 1"),
        (("--lengths", "512,512"), "'512,512' names a number twice"),
        (("--lengths", "1k"), "'1k' is not a whole number"),
        (("--depths", "101"), "101 is above 100"),
        (("--lengths", "2048"), "--lengths 2048 is above the context of 1024 tokens"),
        (("--lengths", "64"), "a length of 64 tokens has no room for the needle"),
        (("--ranks", "99"), "99"),
        (("--model", "/none"), "/none is no model directory"),
        (("--config", "/none.yml"), "can't read config file /none.yml"),
        (("--out", "/"), "--out / is a folder; give a file"),
        (("--out", "/dev/null/e.json"), "/dev/null/e.json can't be written"),
    ],
)
def test_bad_input_is_2_in_one_line(run: Any, flags: tuple[str, ...], told: str) -> None:
    code, out, err = run(*flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_a_plan_that_does_not_fit_is_3(run: Any, tmp_path: Path) -> None:
    config = tmp_path / "small.yml"
    config.write_text("usable_bytes: 1000000\n")
    code, out, err = run("--config", str(config))
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert not (tmp_path / "evidence.json").exists()


def test_an_interrupt_is_130_and_keeps_the_file(run: Any, script: Script, tmp_path: Path) -> None:
    script.ends_after, script.end_by = 3, KeyboardInterrupt()
    code, out, err = run()
    assert (code, out) == (130, "")
    assert err.endswith("nrank: the same command goes on with the next cell\nnrank: interrupted\n")
    assert len(read_evidence(str(tmp_path / "evidence.json")).cells) == 3
    script.ends_after = -1
    code, out, err = run()
    assert code == 0
    assert "evidence.json has 3 cells already" in err


def test_a_file_of_another_configuration_is_refused(run: Any, script: Script) -> None:
    assert run()[0] == 0
    code, out, err = run("--prefix-cache", "off")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "plan_id was " in err
    assert "--overwrite to begin anew" in err


def test_without_lengths_the_context_is_reached_by_doubling(run: Any, script: Script) -> None:
    from deploy.certify_command import default_lengths

    assert default_lengths(512) == (512,)
    assert default_lengths(3000) == (512, 1024, 2048, 3000)
    assert default_lengths(100) == (100,)


@pytest.mark.slow
def test_a_real_run_that_is_killed_is_resumed(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded model on one rank: SIGKILL after two cells, the rest in a second run."""
    path = tmp_path / "evidence.json"
    command = [sys.executable, "-m", "deploy.cli", "certify", *SMALL, "--out", str(path)]
    home = Path(__file__).parents[3]
    with subprocess.Popen(
        command, cwd=home, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        deadline_s = time.monotonic() + WAIT_S
        while not path.exists() or len(read_evidence(str(path)).cells) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    kept = read_evidence(str(path))
    revision = kept.binding.revision  # a commit beside this test makes no difference to it
    monkeypatch.setattr("deploy.certify.binding.code_revision", lambda: revision)
    code, out, _ = run()
    evidence = read_evidence(str(path))
    assert (code, evidence.certified_tokens) == (0, 256), out
    assert evidence.cells[: len(kept.cells)] == kept.cells
    assert len(evidence.cells) == NUM_CELLS
    assert all(cell.cached_tokens >= 64 for cell in evidence.of(Pass.REUSE, 256))
