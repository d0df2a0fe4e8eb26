"""What a user sees of a load: lines redrawn on a terminal, seldom a line without one."""

from __future__ import annotations

import io
import pty
import sys

import pytest

from deploy import cli
from deploy.load_display import LINE_S, LoadDisplay, LoadLines, is_terminal
from rank_worker.messages import LoadProgress

MIB = 1 << 20


def ranks(*read_mib: int) -> list[LoadProgress]:
    return [LoadProgress(i, "loading", mib * MIB, 64 * MIB, 2.0) for i, mib in enumerate(read_mib)]


def screen(text: str) -> list[str]:
    """The lines that a terminal shows after `text`, of the few codes that are used here."""
    lines, row = [""], 0
    at = 0
    while at < len(text):
        if text.startswith("\x1b[", at):
            end = next(i for i in range(at + 2, len(text)) if text[i].isalpha())
            code, count = text[end], text[at + 2 : end]
            if code == "A":
                row -= int(count)
            elif code == "J":
                lines = [*lines[:row], ""]
            at = end + 1
        elif text[at] == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
            at += 1
        elif text[at] == "\r":
            at += 1
        else:
            end = min(i for i in (text.find(c, at) for c in "\x1b\n\r") if i >= 0)
            lines[row] = text[at:end]
            at = end
    return lines


def test_each_rank_has_a_line_that_is_redrawn_in_place() -> None:
    out = io.StringIO()
    display = LoadDisplay(out)
    display.update(ranks(16, 32))
    display.update(ranks(32, 64))
    shown = screen(out.getvalue())
    assert len(shown) == 3
    assert shown[0].startswith("[############............] rank 0: 32.0 MiB of 64.0 MiB (50%)")
    assert shown[1].startswith("[########################] rank 1: 64.0 MiB of 64.0 MiB (100%)")
    display.clear()
    assert screen(out.getvalue()) == [""]


def test_the_slowest_rank_is_marked_and_a_single_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LoadDisplay, "_columns", lambda self: 200)
    out = io.StringIO()
    LoadDisplay(out).update(ranks(32, 16, 64))
    marked = [line.endswith("<- slowest") for line in screen(out.getvalue())]
    assert marked == [False, True, False, False]
    alone = io.StringIO()
    LoadDisplay(alone).update(ranks(32))
    assert "slowest" not in alone.getvalue()


def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadDisplay, "_columns", lambda self: 30)
    out = io.StringIO()
    LoadDisplay(out).update(ranks(32, 16))
    assert [len(line) for line in screen(out.getvalue())] == [29, 29, 0]


def test_without_a_terminal_lines_come_seldom() -> None:
    now, said = [100.0], list[str]()
    lines = LoadLines(said.append, lambda: now[0])
    for now[0] in (100.0, 100.5, 100 + LINE_S - 0.1):
        lines.update(ranks(16, 32))
    assert said == [
        "loading: 48.0 MiB of 128.0 MiB read; slowest is rank 0: 16.0 MiB of 64.0 MiB (25%), "
        "8.4 MB/s, 6 s left"
    ]
    now[0] = 100 + LINE_S
    lines.update(ranks(64, 64))
    assert said[1:] == ["loading: 128.0 MiB of 128.0 MiB read"]


def test_a_file_and_a_dumb_terminal_are_no_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    with open(leader, "rb"), open(follower, "w") as stream:
        monkeypatch.setenv("TERM", "xterm")
        assert is_terminal(stream)
        monkeypatch.setenv("TERM", "dumb")
        assert not is_terminal(stream)
    monkeypatch.setenv("TERM", "xterm")
    assert not is_terminal(io.StringIO())


def test_generate_shows_a_load_on_a_terminal_and_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--prompt-ids", "1,2", "--json", "--max-tokens", "2", "--ranks", "2"]
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    with open(leader, "rb", buffering=0) as seen, open(follower, "w") as terminal:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", terminal)
            assert cli.main(command) == 0
        told = seen.read(1 << 16).decode()
    assert "rank 1" in told
    assert "decode step: at least" in told
    assert cli.main(command) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    assert captured.out.count('{"prompt_ids": [1, 2]') == 2
