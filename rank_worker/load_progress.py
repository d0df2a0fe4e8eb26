"""How far ranks have loaded, as figures and as text: rate, time left, and which rank is slowest.

Pure functions of what ranks told; asks nobody and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from placement.explain import format_bytes
from rank_worker.messages import LoadProgress


def is_complete(progress: LoadProgress) -> bool:
    """All weights are read; what may still go on is a wait for other ranks."""
    return 0 < progress.planned_bytes <= progress.read_bytes


def bytes_per_s(progress: LoadProgress) -> float:
    """Mean rate since the rank began to read; 0 before it read anything."""
    return progress.read_bytes / progress.seconds if progress.seconds > 0 else 0.0


def remaining_s(progress: LoadProgress) -> float:
    """Time left at the mean rate so far; infinite while there is none."""
    if is_complete(progress):
        return 0.0
    rate = bytes_per_s(progress)
    left = progress.planned_bytes - progress.read_bytes
    return left / rate if rate and progress.planned_bytes else inf


def slowest(ranks: Sequence[LoadProgress]) -> LoadProgress | None:
    """The rank that the others will wait for; None when all have read everything."""
    loading = [one for one in ranks if not is_complete(one)]
    return max(loading, key=lambda one: (remaining_s(one), -_share(one), -one.rank), default=None)


def rank_text(progress: LoadProgress) -> str:
    """`rank 1: 12.0 MiB of 40.0 MiB (30 %), 80.1 MB/s, 2 s left`."""
    if not progress.planned_bytes:
        return f"rank {progress.rank}: {progress.phase}, nothing read yet"
    read, planned = format_bytes(progress.read_bytes), format_bytes(progress.planned_bytes)
    text = f"rank {progress.rank}: {read} of {planned} ({_share(progress):.0%})"
    rate = bytes_per_s(progress)
    if rate:
        text += f", {rate / 1e6:.1f} MB/s"
    if is_complete(progress):
        return f"{text}, all read"
    return f"{text}, {_duration(remaining_s(progress))} left" if rate else text


def gang_text(ranks: Sequence[LoadProgress]) -> str:
    """All ranks in one line, with the slowest named once any has begun."""
    if not any(one.planned_bytes for one in ranks):
        return "no weights read yet"
    read = format_bytes(sum(one.read_bytes for one in ranks))
    planned = format_bytes(sum(one.planned_bytes for one in ranks))
    text = f"{read} of {planned} read"
    late = slowest(ranks)
    return f"{text}; slowest is {rank_text(late)}" if late is not None else text


def _share(progress: LoadProgress) -> float:
    return progress.read_bytes / progress.planned_bytes if progress.planned_bytes else 0.0


def _duration(seconds: float) -> str:
    """Whole seconds below two minutes, else minutes or hours and minutes."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
