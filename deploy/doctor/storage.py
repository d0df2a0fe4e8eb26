"""File systems that nrank reads from and writes to: their kind and the room on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from deploy.doctor.finding import Finding, Severity
from deploy.doctor.machine import Machine

MIB = 1 << 20
GIB = 1 << 30
MOUNTS = "/proc/self/mounts"
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs", "fuse.s3fs")
VIRTUAL = ("vd", "xvd")
IN_MEMORY = ("tmpfs", "ramfs")
OBJECT_STORE_BYTES = 256 * MIB  # of the Ray that `nrank serve` starts
RAY_FULL = 0.95  # Ray takes no more objects on a disk fuller than this
TEMP_BYTES = 1 * GIB  # Ray's session logs are rotated at 512 MiB a process


def check_storage(machine: Machine, model_dir: str) -> Iterator[Finding]:
    yield _model_place(machine, model_dir)
    yield _temp(machine, machine.environ.get("RAY_TMPDIR") or "/tmp")
    yield _shared_memory(machine)


def mount_of(machine: Machine, path: str) -> tuple[str, str]:
    """Mount point and kind of the file system that holds `path`; "" where it can't be told."""
    best = ("", "")
    for line in (machine.read(MOUNTS) or "").splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, fields[2])
    return best


def is_rotating(machine: Machine, path: str) -> bool:
    """Whether the kernel says so of the disk below `path`; a partition asks its disk.

    Disks of a virtual machine all say so, whatever is below them: they don't count.
    """
    try:
        number = os.stat(machine.path(path)).st_dev
    except OSError:
        return False
    node = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if os.path.basename(os.path.realpath(machine.path(node))).startswith(VIRTUAL):
        return False
    flags = (machine.read(f"{node}{up}/queue/rotational") for up in ("", "/.."))
    return any((flag or "").strip() == "1" for flag in flags)


def _model_place(machine: Machine, model_dir: str) -> Finding:
    path = str(Path(model_dir).resolve())
    point, kind = mount_of(machine, path)
    told = f"{path} on {kind or 'an unknown file system'} ({point or 'no mount point'})"
    if room := _room(machine, path):
        told += f", {room[0] / GIB:.1f} GiB free"
    slow = {
        "a network": kind in NETWORK,
        "memory, which ranks need": kind in IN_MEMORY,
        "a rotating disk": is_rotating(machine, path),
    }
    reasons = [reason for reason, holds in slow.items() if holds]
    if not reasons:
        return Finding("disk.model", Severity.OK, told)
    return Finding(
        id="disk.model",
        severity=Severity.WARNING,
        found=f"{told}: {reasons[0]}",
        expected="a local solid-state disk",
        source="every rank reads its own part, at the same time",
        remedy="copy the checkpoint to a local disk, or set load_timeout_s for the slow one",
    )


def _temp(machine: Machine, path: str) -> Finding:
    room = _room(machine, path)
    if room is None:
        return Finding(
            "disk.temp", Severity.ERROR, f"{path} can't be read", "a directory for Ray's sessions",
            "RAY_TMPDIR, else /tmp", f"make {path}, or name another with RAY_TMPDIR",
        )  # fmt: skip
    free, total = room
    told = f"{path}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    expected = f"{TEMP_BYTES / GIB:g} GiB, and {1 - RAY_FULL:.0%}"
    if free >= TEMP_BYTES and free >= (1 - RAY_FULL) * total:
        return Finding("disk.temp", Severity.OK, told, expected)
    # A file system that is nearly full still starts a server; one without room does not.
    severity = Severity.WARNING if free >= OBJECT_STORE_BYTES else Severity.ERROR
    return Finding(
        "disk.temp", severity, told, expected, "Ray's logs and objects lie there",
        f"remove old {path}/ray/session_*, or name another place with RAY_TMPDIR",
    )  # fmt: skip


def _shared_memory(machine: Machine) -> Finding:
    room = _room(machine, "/dev/shm")
    if room is not None and room[0] >= OBJECT_STORE_BYTES:
        told = f"/dev/shm: {room[0] / MIB:.0f} MiB free"
        return Finding("disk.shm", Severity.OK, told, f"{OBJECT_STORE_BYTES / MIB:.0f} MiB")
    return Finding(
        id="disk.shm",
        severity=Severity.WARNING,
        found=f"/dev/shm: {room[0] / MIB:.0f} MiB free" if room is not None else "no /dev/shm",
        expected=f"{OBJECT_STORE_BYTES / MIB:.0f} MiB",
        source="Ray's object store; it falls back to the disk",
        remedy="in a container: --shm-size=1g; else remove what fills it",
    )


def _room(machine: Machine, path: str) -> tuple[int, int] | None:
    """Bytes that this user may still write, and all; None where there is no directory."""
    try:
        found = os.statvfs(machine.path(path))
    except OSError:
        return None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
