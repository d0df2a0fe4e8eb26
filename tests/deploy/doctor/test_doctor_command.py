"""`nrank doctor` as a command: exit codes, the table, the JSON, and machines without anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import cli, doctor_command
from deploy.doctor.finding import Finding, Severity

ROOT = Path(__file__).parents[3]
ERROR = Finding("a.b", Severity.ERROR, "found", "expected", "source", "remedy", "x")
FIELDS = {"id", "severity", "found", "expected", "source", "remedy", "subject"}


def test_this_machine_is_fit_for_the_cpu_and_says_what_it_lacks_for_npu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """CI has neither a chip nor its software; where one of them is, the others may be too."""
    assert cli.main(["doctor", "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["device"], told["must_fix"]) == (1, "cpu", 0)
    assert all(set(finding) == FIELDS for finding in told["findings"])
    if Path("/dev/davinci_manager").exists() or Path("/usr/local/Ascend").exists():
        pytest.skip("this machine has NPU software: what it lacks is its own matter")
    assert cli.main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    must = {
        f"{f['id']} {f['subject']}".strip() for f in told["findings"] if f["severity"] == "error"
    }
    expected = {"packages.version torch_npu", "driver.version", "cann.version", "devices.files"}
    assert must == expected
    assert told["must_fix"] == len(expected)


def test_the_worst_comes_first_with_its_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding("z.ok", Severity.OK, "fine"), ERROR]
    monkeypatch.setattr(doctor_command, "examine", lambda *_: findings)
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["FIX", "a.b", "x", "found"]
    assert lines[1].split(": ")[1:] == ["expected (source)"]
    assert lines[2].split(": ")[1:] == ["remedy"]
    assert lines[3].split() == ["ok", "z.ok", "fine"]
    assert lines[4] == "npu: 1 to fix, 0 warnings, 0 unknown, 1 ok"


@pytest.mark.parametrize(
    ("severity", "code"),
    [(Severity.OK, 0), (Severity.ABSENT, 0), (Severity.WARNING, 0), (Severity.ERROR, 1)],
)
def test_only_what_must_be_fixed_is_a_failure(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    severity: Severity,
    code: int,
) -> None:
    finding = Finding("a", severity, "found")
    monkeypatch.setattr(doctor_command, "examine", lambda *_: [finding])
    assert cli.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["findings"][0]["severity"] == severity.value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--device", "abacus"], "invalid choice: 'abacus'"),
        (["--model", "/no/where"], "/no/where is no model directory"),
    ],
)
def test_bad_input_of_the_doctor_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    try:
        code: Any = cli.main(["doctor", *arguments])
    except SystemExit as end:
        code = end.code
    err = capsys.readouterr().err
    assert code == 2
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_the_doctor_works_where_nothing_can_be_imported(device: str) -> None:
    blocked = ["torch", "torch_npu", "ray", "numpy", "transformers", "pydantic", "yaml"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}));"
        "from deploy.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--device", device],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == (0 if device == "cpu" else 1), done.stderr
    assert not done.stderr
