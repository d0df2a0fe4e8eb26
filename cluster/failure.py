"""The end of a gang as its operator wants to read it: who, where, when, and the last words.

The log is the file that a rank writes its errors to; it is there on the rank's own node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb

from placement.errors import CheckpointError, ConfigError, NrankError, PlanError, RankError
from rank_worker.messages import RankIdentity

TAIL_LINES = 20
TAIL_BYTES = 8192
LINE_CHARACTERS = 300
RUN = "run"
FATAL = (ConfigError, PlanError, CheckpointError)  # another start would end the same way


@dataclass(frozen=True)
class Failure:
    """Why a gang ended. Without a single rank to blame `rank` is -1 and there is no log.

    A start phase names itself; where a rank died without a word the phase is "run".
    """

    epoch: int
    time_s: float
    message: str
    rank: int = -1
    step: int = -1
    phase: str = ""
    log_tail: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: NrankError, epoch: int, identities: Sequence[RankIdentity]) -> Failure:
        now_s, text = time.time(), str(error)
        if not isinstance(error, RankError) or not 0 <= error.rank < len(identities):
            return cls(epoch, now_s, text)
        tail = log_tail(identities[error.rank].log_path)
        return cls(epoch, now_s, text, error.rank, error.step, error.phase or RUN, tail)


def public_text(error: NrankError) -> str:
    """What clients are told of the end of a gang: no process ids, paths or others' requests."""
    if isinstance(error, FATAL):
        return "the gang can't be started; the server's log and /status say why"
    if not isinstance(error, RankError):
        return "the coordinator failed and is replaced"
    who = f"rank {error.rank}" if error.rank >= 0 else "a rank"
    return f"{who} failed (phase {error.phase or RUN})"


def own_log_path() -> str:
    """The file that this process writes its errors to; "" when it is none."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if os.path.isfile(path) else ""


def last_words(error: BaseException) -> str:
    """One line for the log of a process that ends by `error`: what was raised, and where first."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    *_, frame = [None, *extract_tb(cause.__traceback__)]
    where = f" ({os.path.basename(frame.filename)}:{frame.lineno})" if frame is not None else ""
    told = "" if cause is error else f"; {error}"
    return " ".join(f"{type(cause).__name__}: {cause}{where}{told}".split())


def log_tail(path: str) -> tuple[str, ...]:
    """The last lines of the file; none where it can't be read."""
    if not path or not os.path.isfile(path):
        return ()
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, os.path.getsize(path) - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError:
        return ()
    lines = data.decode("utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return tuple(line[:LINE_CHARACTERS] for line in lines)
