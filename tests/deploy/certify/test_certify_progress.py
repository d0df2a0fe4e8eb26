"""What a terminal and a log see of a certification."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.certify.progress import Progress
from placement.evidence import Cell, Evidence, Pass
from tests.deploy.certify.scripted_gang import LENGTHS, certify, scripted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedTerminal(Terminal):
    def write(self, _: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    script = scripted()
    script.faults = {(Pass.REUSE, LENGTHS[0], 1): "other"}
    return certify(tmp_path / "e.json", script)


def tell(stream: io.StringIO, evidence: Evidence) -> None:
    """As a run does, on a clock that goes on by a second a cell."""
    seconds = iter(range(1000))
    progress = Progress(stream, lambda: float(next(seconds)))
    for count in range(1, len(evidence.cells) + 1):
        part = replace(evidence, cells=evidence.cells[:count])
        progress.update(part, part.cells[-1])
    progress.clear()


def test_a_log_gets_a_line_a_cell(evidence: Evidence) -> None:
    stream = io.StringIO()
    tell(stream, evidence)
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(evidence.cells)
    assert lines[0] == "grid 150 tokens, needle at 0 %, 0.5 s: passed; 1/32 cells, 0:47 left"
    assert lines[3] == (
        "reuse 150 tokens, needle at 50 %, 0.5 s, 64 cached: FAILED: other ids than alone in the "
        "first gang; 4/32 cells, 0:44 left"
    )
    assert lines[-1] == "fill 300 tokens, needle at 0 %, 0.5 s: passed; 32/32 cells"


def test_a_terminal_gets_one_line_redrawn_and_failures_stay(
    evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    tell(stream, evidence)
    text = stream.getvalue()
    assert text.count("\n") == sum(not cell.passed for cell in evidence.cells) == 1
    assert text.endswith("\r\x1b[K")
    assert "\r[############............] restart 150 tokens, needle" in text
    assert max(map(len, text.replace("\n", "\r").split("\r"))) < 120


def test_a_terminal_that_was_closed_ends_nothing(
    evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    tell(ClosedTerminal(), evidence)


def test_a_failure_is_one_line_whatever_the_answer_holds(evidence: Evidence) -> None:
    stream = io.StringIO()
    cell: Cell = replace(evidence.cells[0], passed=False, reason="answered 'a\\nb'")
    Progress(stream).update(replace(evidence, cells=(cell,)), cell)
    assert stream.getvalue().count("\n") == 1
