"""Output files: whole or as they were, and what is no file stays what it is, for every command."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy import cli
from deploy.gpqa import make_questions
from placement.errors import ConfigError
from placement.whole_file import OWNER_ONLY, require_place, write_whole

Command = Callable[[str], int]


def questions(out: str) -> int:
    with pytest.raises(SystemExit) as end:
        make_questions.main(["--count", "1", "--out", out])
    return int(end.value.code or 0)


COMMANDS: dict[str, Command] = {
    "make_questions": questions,
    "bench": lambda out: cli.main(["bench", "--quick", "--ops", "--out", out]),
    "report": lambda out: cli.main(["report", "--url", "http://127.0.0.1:9", "--out", out]),
    "check-quality": lambda out: cli.main(["check-quality", "--write-baseline", out]),
    "certify": lambda out: cli.main(["certify", "--overwrite", "--out", out]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_fifo_is_refused_in_one_line_before_the_work(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert COMMANDS[name](str(fifo)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{fifo} is a FIFO; give a file" in err
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert [one.name for one in tmp_path.iterdir()] == ["fifo"]


def test_nothing_but_a_file_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "socket"))
        for name, kind in (
            ("fifo", "a FIFO"), ("folder", "a folder"), ("link", "a FIFO"), ("socket", "a socket")
        ):  # fmt: skip
            before = os.lstat(tmp_path / name)
            with pytest.raises(ConfigError, match=rf"--out .*{name} is {kind}; give a file"):
                require_place("--out", tmp_path / name)
            with pytest.raises(OSError, match=f"it is {kind}"):
                write_whole(tmp_path / name, "text")
            assert os.lstat(tmp_path / name).st_ino == before.st_ino
    assert len(list(tmp_path.iterdir())) == 4


def test_places_without_a_folder_are_refused(tmp_path: Path) -> None:
    require_place("--out", tmp_path / "file")
    with pytest.raises(ConfigError, match=r"there is no folder .*/none; make it first"):
        require_place("--out", tmp_path / "none" / "file")
    with pytest.raises(ConfigError, match="File name too long; give a file"):
        require_place("--out", tmp_path / ("x" * 256))


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, file = tmp_path / "link", tmp_path / "there" / "file"
    link.symlink_to(file)
    for text in ("first", "second"):
        write_whole(link, text, OWNER_ONLY)
        assert (link.is_symlink(), file.read_text()) == (True, text)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in file.parent.iterdir()] == ["file"]


def test_a_full_disk_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    write_whole(tmp_path / "file", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", b"new")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"
