"""Recorded answers of npu-smi, and a stand-in for the program itself."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rank_worker.device_sensors.smi_program import SmiProgram

RECORDED = Path(__file__).parent / "npu_smi"
# Notes each call, and whether another one ran meanwhile, which the real program can't bear.
SCRIPT = """#!/bin/sh
cd "$(dirname "$0")"
mkdir running 2>/dev/null || echo "$*" >> overlaps
echo "$*" >> calls
{body}
rmdir running
exit ${{code:-0}}
"""
ANSWER = """
file="answers/$(echo "$*" | tr ' ' '_')"
if [ -f "$file" ]; then cat "$file"; else echo "Error parameter of $2"; code=1; fi
"""


@dataclass(frozen=True)
class FakeSmi:
    """A folder with an `npu-smi` in it."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "npu-smi"

    def runs(self, body: str) -> None:
        """Shell lines that every call runs; `code` is its exit code."""
        new = self.folder / "new"
        new.write_text(SCRIPT.format(body=body))
        new.chmod(0o755)
        new.rename(self.path)

    def answers(self, **texts: str) -> None:
        """Answers by their arguments, blanks and minus signs as `_`: info__t_ecc__i_2__c_0."""
        folder = self.folder / "answers"
        folder.mkdir(exist_ok=True)
        for name, text in texts.items():
            (folder / name.replace("__", "_-")).write_text(text)
        self.runs(ANSWER)

    def calls(self) -> list[str]:
        return self._lines("calls")

    def overlaps(self) -> list[str]:
        return self._lines("overlaps")

    def program(self, timeout_s: float = 20.0) -> SmiProgram:
        return SmiProgram(self.path, self.folder, timeout_s)

    def _lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture(scope="session")
def recorded() -> Callable[[str], str]:
    """The text of a recorded answer by its name."""
    return lambda name: (RECORDED / f"{name}.txt").read_text()


@pytest.fixture
def smi(tmp_path: Path) -> FakeSmi:
    folder = tmp_path / "smi"
    folder.mkdir()
    return FakeSmi(folder)


@pytest.fixture
def compiler() -> str:
    found = shutil.which("cc")
    if found is None:
        pytest.skip("needs a C compiler")
    return found


def is_gone(pid: int) -> bool:
    """Nobody but init waits for a grandchild: dead and not waited for is gone too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition: Callable[[], bool], file: Path | None = None) -> str:
    """Until it holds, at most 30 s; the text of `file`."""
    deadline = time.monotonic() + 30
    while not condition() or (file is not None and not file.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return file.read_text() if file else ""
