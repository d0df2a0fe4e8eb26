"""Signals of `nrank serve`: counted by the handler, seen by whoever waits, not raised inside C."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.signals import SIGNALS, Interrupted, SignalFlag

ROOT = Path(__file__).parents[2]
LONG_S = 30.0  # reached by a failure only


@pytest.fixture
def flag() -> Iterator[SignalFlag]:
    before = signal.getsignal(signal.SIGHUP)
    with SignalFlag() as one:
        yield one
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("signum", SIGNALS)
def test_the_first_signal_is_told_and_the_second_one_interrupts(
    flag: SignalFlag, signum: signal.Signals
) -> None:
    flag.serving()
    assert not flag.wait(0)
    signal.raise_signal(signum)  # raises nothing here
    assert flag.wait(LONG_S)
    flag.check()
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"):
        flag.check()


def test_a_closed_terminal_is_told_twice_and_is_one_signal() -> None:
    """By the kernel and by the shell, the second time whenever it likes."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        with SignalFlag() as flag:
            flag.serving()
            signal.raise_signal(signal.SIGHUP)
            assert flag.wait(0)
            signal.raise_signal(signal.SIGHUP)
            flag.check()
        signal.raise_signal(signal.SIGHUP)  # would end this process
    finally:
        signal.signal(signal.SIGHUP, before)


def test_before_it_serves_one_signal_interrupts_every_wait(flag: SignalFlag) -> None:
    signal.raise_signal(signal.SIGINT)
    for ask in (flag.check, flag.serving, lambda: flag.wait(LONG_S)):
        with pytest.raises(Interrupted, match="SIGINT"):
            ask()


def test_work_apart_is_left_alone_by_a_signal_and_settles(flag: SignalFlag) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        may_end.wait(LONG_S)
        ended.set()

    with pytest.raises(Interrupted):
        flag.apart(work)
    assert not ended.is_set()
    may_end.set()
    flag.settle()
    assert ended.is_set()


def test_work_apart_gives_its_result_or_its_error(flag: SignalFlag) -> None:
    assert flag.apart(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        flag.apart(lambda: 1 // 0)


def test_a_process_under_nohup_is_not_ended_by_a_hangup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalFlag() as flag:
            signal.raise_signal(signal.SIGHUP)
            flag.check()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_under_way_goes_on_when_its_terminal_is_closed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from deploy.signals import SignalFlag\n"
        "with SignalFlag() as flag:\n"
        "    flag.serving(); print('up', flush=True); flag.wait(30)\n"
        "    print('unseen', flush=True); print('unseen', file=sys.stderr, flush=True)\n"
        "    Path(sys.argv[1]).write_text('done')\n"
    )
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "end")],
        cwd=ROOT, stdin=side, stdout=side, stderr=side, start_new_session=True,
    )  # fmt: skip
    os.close(side)
    assert os.read(terminal, 2) == b"up"
    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    assert process.wait(LONG_S) == 0
    assert (tmp_path / "end").read_text() == "done"
