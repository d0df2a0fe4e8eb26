"""Calls of an npu-smi that hangs, errs, floods, dies or runs already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rank_worker.device_sensors import smi_program
from rank_worker.device_sensors.smi_program import SmiProgram, find_program
from rank_worker.device_sensors.smi_table import parse_info
from rank_worker.device_sensors.source import SensorError
from tests.rank_worker.sensors.conftest import FakeSmi, is_gone, wait_for

ROOT = Path(__file__).parents[3]


def test_the_answer_is_complete_though_its_line_end_is_missing(smi: FakeSmi) -> None:
    smi.runs("printf 'one\\ntwo'")
    assert smi.program().run("info") == "one\ntwo\n"


def test_words_are_english_and_the_drivers_libraries_are_found(
    smi: FakeSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    smi.runs('echo "$LC_ALL $LD_LIBRARY_PATH"')
    locale, paths = smi.program().run("info").split()
    assert locale == "C"
    assert paths.split(":")[0] == "/mine"
    assert "/usr/local/Ascend/driver/lib64/driver" in paths.split(":")


def test_nothing_is_left_of_a_call_that_hangs(smi: FakeSmi) -> None:
    """Its child holds the pipe too: only the whole group's end frees it."""
    smi.runs("sleep 1000 & echo $! > child; echo $$ > self; sleep 1000")
    with pytest.raises(SensorError, match=r"`npu-smi info` did not end within 0.3 s"):
        smi.program(0.3).run("info")
    left = [int((smi.folder / name).read_text()) for name in ("self", "child")]
    wait_for(lambda: all(is_gone(pid) for pid in left))


def test_an_answer_without_end_is_cut_off(smi: FakeSmi) -> None:
    smi.runs("yes")
    with pytest.raises(SensorError, match="printed more than 1048576 bytes"):
        smi.program().run("info")


def test_a_killed_call_is_no_answer(smi: FakeSmi) -> None:
    smi.runs("echo '| half a table'; kill -9 $$")
    with pytest.raises(SensorError, match="was ended by signal 9"):
        smi.program().run("info")


def test_errors_on_stderr_with_exit_code_0(smi: FakeSmi, recorded: Callable[[str], str]) -> None:
    text = recorded("error_device_used_8020").strip()
    smi.runs(f"echo '{text}' >&2")
    with pytest.raises(SensorError, match=r"ret is -8020; a container"):
        smi.program().run("info")


def test_an_error_of_one_chip_does_not_cost_the_others(
    smi: FakeSmi, recorded: Callable[[str], str]
) -> None:
    smi.answers(
        info='Failed to query "x" result.\n' + recorded("info_300iduo_two_cards_idle"),
    )
    assert len(parse_info(smi.program().run("info")).chips) == 4


def test_an_exit_code_without_a_known_error_line(smi: FakeSmi) -> None:
    smi.runs("echo strange >&2; code=3")
    with pytest.raises(SensorError, match="`npu-smi info` ended with 3: strange"):
        smi.program().run("info")


def test_a_program_that_can_not_start(smi: FakeSmi) -> None:
    with pytest.raises(SensorError, match=r"can't start .*npu-smi: No such file"):
        smi.program().run("info")


def test_bytes_that_are_no_text(smi: FakeSmi) -> None:
    smi.runs("head -c 5000 /dev/urandom")
    assert smi.program().run("info")


def test_two_callers_take_turns(smi: FakeSmi) -> None:
    """Another process calls while this one does; the stand-in notes calls at the same time."""
    smi.runs("sleep 0.05")
    code = (
        "import sys; from pathlib import Path; "
        "from rank_worker.device_sensors.smi_program import SmiProgram; "
        "p = SmiProgram(Path(sys.argv[1]), Path(sys.argv[2]), 20.0); "
        "[p.run('info') for _ in range(10)]"
    )
    other = subprocess.Popen([sys.executable, "-c", code, smi.path, smi.folder], cwd=ROOT)
    program = smi.program()
    for _ in range(10):
        program.run("info")
    assert other.wait(60) == 0
    assert len(smi.calls()) == 20
    assert smi.overlaps() == []


def test_a_call_whose_caller_died_is_ended(smi: FakeSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smi_program, "LOCK_GRACE_S", 0.2)
    smi.runs("echo $$ > self; exec sleep 1000")
    code = (
        "import sys; from pathlib import Path; "
        "from rank_worker.device_sensors.smi_program import SmiProgram; "
        "SmiProgram(Path(sys.argv[1]), Path(sys.argv[2]), 1000.0).run('info')"
    )
    caller = subprocess.Popen([sys.executable, "-c", code, smi.path, smi.folder], cwd=ROOT)
    orphan = int(wait_for(lambda: (smi.folder / "self").exists(), smi.folder / "self"))
    wait_for(lambda: (smi.folder / "npu-smi.lock").read_text().strip() == str(orphan))
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    smi.runs("rmdir running; mkdir running; echo fine")
    program = smi.program(0.2)
    with pytest.raises(SensorError, match=rf"another npu-smi of nrank \(pid {orphan}\) still ran"):
        program.run("info")
    wait_for(lambda: is_gone(orphan))
    assert SmiProgram(smi.path, smi.folder, 20.0).run("info") == "fine\n"


def test_it_is_found_on_path_first(smi: FakeSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.runs("true")
    monkeypatch.setenv("PATH", f"{smi.folder}{os.pathsep}{os.environ['PATH']}")
    assert find_program() == smi.path
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(smi_program, "PLACES", (str(smi.folder),))
    assert find_program() == smi.path
    monkeypatch.setattr(smi_program, "PLACES", ())
    assert find_program() is None
