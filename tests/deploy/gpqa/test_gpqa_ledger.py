"""The ledger: what a killed writer leaves, who may write, and which run resumes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.gpqa.ledger import FILE, Ledger, LedgerFailure, read_ledger
from deploy.gpqa.records import End, Header, Session, from_line, to_line
from placement.errors import ConfigError
from tests.deploy.gpqa.ledger_samples import ANSWER, FAILURE, HEADER, SESSION


def write(folder: Path, *records: object) -> None:
    ledger = Ledger(folder, HEADER)
    for record in records:
        ledger.append(record)  # type: ignore[arg-type]
    ledger.close()


@pytest.mark.parametrize("record", [HEADER, SESSION, ANSWER, FAILURE, End(3.0, "done")])
def test_records_come_back_as_they_were(record: Header | Session) -> None:
    assert from_line(to_line(record)) == record
    assert to_line(record).count(b"\n") == 1


def test_a_ledger_cut_at_any_byte_resumes_with_its_whole_lines(tmp_path: Path) -> None:
    write(tmp_path, SESSION, ANSWER)
    data = (tmp_path / FILE).read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data)):
        (tmp_path / FILE).write_bytes(data[:size])
        ledger = Ledger(tmp_path, HEADER)
        whole = sum(end <= size for end in ends)
        assert len(ledger.contents.records) == max(0, whole - 1)
        ledger.append(FAILURE)
        ledger.close()
        assert read_ledger(tmp_path).records[-1] == FAILURE
        kept = data[: ends[max(whole, 1) - 1]]
        assert (tmp_path / FILE).read_bytes() == kept + to_line(FAILURE)


def test_a_reader_sees_whole_lines_and_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, SESSION)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes() + b'{"kind":"ans')
    before = path.read_bytes()
    assert read_ledger(tmp_path).records == (SESSION,)
    assert path.read_bytes() == before


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    first = Ledger(tmp_path, HEADER)
    with pytest.raises(ConfigError, match="written by another process"):
        Ledger(tmp_path, HEADER)
    first.close()
    Ledger(tmp_path, HEADER).close()


def test_another_run_does_not_resume_and_is_not_changed(tmp_path: Path) -> None:
    write(tmp_path, ANSWER)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(
        ConfigError, match=r"another run: dataset_sha256 d{12} -> e{12}, model m -> n; "
    ):
        Ledger(tmp_path, replace(HEADER, model="n", dataset_sha256="e" * 64))
    assert (tmp_path / FILE).read_bytes() == before
    again = replace(HEADER, run_id="other", created_at=9.0)  # as every resumed run has
    ledger = Ledger(tmp_path, again)
    assert ledger.contents.header == HEADER
    ledger.close()


@pytest.mark.parametrize(
    "line", [b"nothing\n", b"{}\n", b"[]\n", b'{"kind":"answer"}\n', b'{"kind":"x"}\n', b"\xff\n"]
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: bytes) -> None:
    write(tmp_path, SESSION)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes() + line + to_line(ANSWER))
    with pytest.raises(ConfigError, match="line 3 is no record"):
        Ledger(tmp_path, HEADER)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(to_line(ANSWER))
    with pytest.raises(ConfigError, match="header not in line 1"):
        Ledger(tmp_path, HEADER)
    (tmp_path / FILE).write_bytes(to_line(HEADER) * 2)
    with pytest.raises(ConfigError, match="header not in line 1"):
        read_ledger(tmp_path)


@pytest.mark.parametrize("text", [b"mine", b"one\ntwo", b'{"kind":"answer","id":"q1"', b"{}"])
def test_a_file_of_something_else_keeps_its_last_line(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FILE).write_bytes(text)
    with pytest.raises(ConfigError, match="choose another --out"):
        Ledger(tmp_path, HEADER)
    assert (tmp_path / FILE).read_bytes() == text


def test_another_runs_last_line_is_not_cut(tmp_path: Path) -> None:
    data = to_line(HEADER) + b'{"kind":"ans'
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(ConfigError, match="another run"):
        Ledger(tmp_path, replace(HEADER, model="n"))
    assert (tmp_path / FILE).read_bytes() == data


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out .* can't be used"):
        Ledger(tmp_path / "file" / "run", HEADER)
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_ledger(tmp_path)
    (tmp_path / FILE).write_text("")
    with pytest.raises(ConfigError, match="holds no run yet"):
        read_ledger(tmp_path)


def test_only_a_folder_of_its_own_is_kept_out_of_repositories(tmp_path: Path) -> None:
    Ledger(tmp_path, HEADER).close()
    assert not (tmp_path / ".gitignore").exists()
    Ledger(tmp_path / "new" / "run", HEADER).close()
    assert (tmp_path / "new" / "run" / ".gitignore").read_text() == "*\n"
    assert not (tmp_path / "new" / ".gitignore").exists()
    assert (tmp_path / "new" / "run" / FILE).stat().st_mode & 0o777 == 0o600


def test_a_record_is_synced_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    ledger = Ledger(tmp_path, HEADER)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    ledger.append(ANSWER)
    assert synced == [(tmp_path / FILE).stat().st_size]
    ledger.close()


def test_a_full_disk_ends_the_writing_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for half a record: a shorter one that would fit after it must not be put there."""
    ledger = Ledger(tmp_path, HEADER)
    write, room = os.write, [40]

    def limited(fd: int, data: bytes) -> int:
        if room[0] == 0:
            room[0] = 1000
            raise OSError(28, "No space left on device")
        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    for record in (ANSWER, End(2.0, "failed")):
        with pytest.raises(LedgerFailure, match="No space left on device; the run resumes"):
            ledger.append(record)
    ledger.close()
    monkeypatch.undo()
    resumed = Ledger(tmp_path, HEADER)
    assert resumed.contents.records == ()
    resumed.close()
