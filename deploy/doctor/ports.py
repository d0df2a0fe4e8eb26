"""TCP ports that a start wants, and which process holds one."""

from __future__ import annotations

import os
from collections.abc import Iterator

from deploy.doctor.finding import Finding, Severity
from deploy.doctor.machine import Machine

PORTS = {
    8000: ("nrank's own", "end that server, or choose another port with --port"),
    6379: ("Ray's, of ray start --head", "nrank serve needs it not: it takes a free one"),
    8265: ("Ray's dashboard", "nothing: nrank serve takes the next one and prints it"),
    52365: ("Ray's job agent", "to submit jobs here end the other Ray; nrank serve runs without"),
}
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTENING = "0A"


def check_ports(machine: Machine) -> Iterator[Finding]:
    """Warnings only: a port in use is as likely a server of ours that runs well."""
    inodes = listening(machine)
    if inodes is None:
        yield Finding(
            "ports.free", Severity.ABSENT, f"{TABLES[0]} can't be read", remedy="look with ss -ltnp"
        )
        return
    for port, (purpose, remedy) in PORTS.items():
        held = inodes.get(port, set())
        if not held:
            yield Finding("ports.free", Severity.OK, "free", purpose, subject=str(port))
            continue
        holder = holder_of(machine, held) or "a process of another user or container"
        yield Finding(
            "ports.free", Severity.WARNING, f"held by {holder}", f"free ({purpose})", TABLES[0],
            remedy, str(port),
        )  # fmt: skip


def listening(machine: Machine) -> dict[int, set[str]] | None:
    """Port -> inodes of the sockets that listen on it, whatever the address; None: no table."""
    texts = [text for table in TABLES if (text := machine.read(table)) is not None]
    if not texts:
        return None
    found: dict[int, set[str]] = {}
    for line in (line for text in texts for line in text.splitlines()[1:]):
        fields = line.split()
        if len(fields) > 9 and fields[3] == LISTENING:
            port = int(fields[1].rpartition(":")[2], 16)
            found.setdefault(port, set()).add(fields[9])
    return found


def holder_of(machine: Machine, inodes: set[str]) -> str:
    """`name (pid N)` of a process with one of these sockets, "" where we may not see it."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in machine.names("/proc"):
        if not pid.isdecimal():
            continue
        for descriptor in machine.names(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(machine.path(f"/proc/{pid}/fd/{descriptor}"))
            except OSError:
                continue
            if target in wanted:
                return f"{process_name(machine, int(pid))} (pid {pid})"
    return ""


def process_name(machine: Machine, pid: int) -> str:
    """What /proc calls a process; "?" for one that is gone or of another namespace."""
    return (machine.read(f"/proc/{pid}/comm") or "?").strip()
