"""Host memory against a checkpoint's bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from deploy.doctor.finding import Finding, Severity
from deploy.doctor.machine import Machine
from deploy.doctor.version_text import MAX_DIGITS

GIB = 1 << 30
MEMINFO = "/proc/meminfo"
# Of a container: cgroup version 2, then 1. Usage includes page cache that can be given back.
LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
RAY_THRESHOLD = 0.95  # Ray's memory monitor kills workers above this share of use


def available_bytes(machine: Machine) -> tuple[int | None, int | None]:
    """Free and total bytes, the container's where it has a limit; None where nobody tells."""
    text = machine.read(MEMINFO) or ""
    total, free = _row(text, "MemTotal"), _row(text, "MemAvailable")
    for limit_file, usage_file in LIMITS:
        limit, usage = _count(machine.read(limit_file)), _count(machine.read(usage_file))
        if limit is not None and total is not None and limit < total:
            total = limit
            left = max(0, limit - (usage or 0))
            return (left if free is None else min(free, left)), total
    return free, total


def _row(text: str, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d{{1,{MAX_DIGITS}}}) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _count(text: str | None) -> int | None:
    number = (text or "").strip()
    return int(number) if number.isdecimal() and len(number) <= MAX_DIGITS else None


def checkpoint_bytes(model_dir: str) -> int:
    """Of all weight files of a model directory."""
    total = 0
    for file in Path(model_dir).glob("*.safetensors"):
        try:
            total += file.stat().st_size
        except OSError:
            continue  # a link to nowhere; `nrank inspect` names it
    return total


def check_memory(machine: Machine, device: str, model_dir: str) -> Iterator[Finding]:
    free, total = available_bytes(machine)
    if free is None or total is None:
        yield Finding(
            "memory.host", Severity.ABSENT, f"{MEMINFO} does not tell", remedy="look with free -g"
        )
        return
    needed = checkpoint_bytes(model_dir)
    told = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free, checkpoint {needed / GIB:.1f} GiB"
    if device == "cpu" and needed > free:
        yield Finding(
            "memory.host", Severity.ERROR, told, "the checkpoint and what ranks add to it",
            "--device cpu keeps all weights in host memory",
            "free memory, or see nrank plan for a smaller dtype",
        )  # fmt: skip
    elif free < (1 - RAY_THRESHOLD) * total:
        yield Finding(
            "memory.host", Severity.ERROR, told, f"at least {1 - RAY_THRESHOLD:.0%} free",
            f"Ray's memory monitor kills workers above {RAY_THRESHOLD:.0%}",
            "end what uses it: ps aux --sort=-rss | head",
        )  # fmt: skip
    elif device != "cpu" and needed > free:
        yield Finding(
            "memory.host", Severity.WARNING, told, "room for the checkpoint in the page cache",
            "weights pass through host memory on their way to the chips",
            "nothing has to be done: each start then reads from the disk again",
        )  # fmt: skip
    else:
        yield Finding("memory.host", Severity.OK, told)
