"""What is told of a gang that ended: rank, phase, step and the end of its log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.failure import LINE_CHARACTERS, TAIL_LINES, Failure, last_words, log_tail
from placement.errors import CheckpointError, RankError
from rank_worker.messages import RankIdentity


def test_a_rank_that_failed_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "rank.err"
    log.write_text("".join(f"line {i}\n" for i in range(5000)) + "x" * 9999 + "\nlast\n")
    ranks = [RankIdentity(1, "n", 0, "a"), RankIdentity(2, "n", 1, "a", str(log))]
    failure = Failure.of(RankError("boom", rank=1, step=7, phase="step"), 3, ranks)
    assert (failure.epoch, failure.rank, failure.step, failure.phase) == (3, 1, 7, "step")
    assert failure.message == "boom"
    assert failure.log_tail[-1] == "last"
    assert len(failure.log_tail) <= TAIL_LINES
    assert max(map(len, failure.log_tail)) <= LINE_CHARACTERS


@pytest.mark.parametrize("error", [CheckpointError("no file"), RankError("all", rank=-1)])
def test_without_a_rank_to_blame_there_is_no_log(error: Exception) -> None:
    failure = Failure.of(error, 1, [RankIdentity(1, "n", 0, "a", "/etc/passwd")])
    assert (failure.rank, failure.log_tail, failure.message) == (-1, (), str(error))


def test_a_log_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in ("", "/no/where", str(tmp_path), str(tmp_path / "fifo")):
        assert log_tail(path) == ()


def test_a_process_knows_the_file_that_its_errors_go_to(tmp_path: Path) -> None:
    code = "from cluster.failure import own_log_path; print(own_log_path())"
    log = tmp_path / "errors"
    with log.open("w") as file:
        told = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=file, check=True, text=True
        )
    assert told.stdout.strip() == str(log)
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert piped.stdout.strip() == ""


def test_last_words_tell_what_was_raised_and_where() -> None:
    def work() -> None:
        try:
            raise ValueError("on\npurpose")
        except ValueError as error:
            raise RankError("rank 1 failed in step 7") from error

    with pytest.raises(RankError) as caught:
        work()
    line = last_words(caught.value)
    assert line.startswith("ValueError: on purpose (test_failure.py:")
    assert line.endswith("; rank 1 failed in step 7")
    assert last_words(KeyError("x")) == "KeyError: 'x'"


def test_status_keeps_the_last_failure_after_the_gang_is_back(desk, drive):
    async def body():
        async with desk() as table:
            await table.serving()
            assert (await table.coordinator.status()).last_failure is None
            table.script.gang.ranks[1].fail(RankError("lost", rank=1, step=4, phase="step"))
            await table.until(lambda: len(table.script.gangs) == 2)
            await table.serving()
            failure = (await table.coordinator.status()).last_failure
            assert (failure.epoch, failure.rank, failure.step) == (1, 1, 4)
            assert "lost" in failure.message

    drive(body())
