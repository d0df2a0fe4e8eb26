"""Device files of the accelerators: which there are, and whether this user may open them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator

from deploy.doctor.finding import Finding, Severity
from deploy.doctor.machine import Machine

CHIPS = {"npu": re.compile(r"davinci\d+"), "cuda": re.compile(r"nvidia\d+")}
SHARED = {
    "npu": ("davinci_manager", "devmm_svm", "hisi_hdc"),
    "cuda": ("nvidiactl", "nvidia-uvm"),
}
VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
RESOURCE = {"npu": "NPU", "cuda": "GPU"}
VENDOR = {"npu": "0x19e5", "cuda": "0x10de"}
PCI = "/sys/bus/pci/devices"
EMPTY_LISTS = ("", "NoDevFiles")  # how Ray reads a list without a chip


def chip_files(machine: Machine, device: str) -> list[str]:
    pattern = CHIPS[device]
    found = [name for name in machine.names("/dev") if pattern.fullmatch(name)]
    return sorted(found, key=lambda name: int(re.sub(r"\D", "", name)))


def cards(machine: Machine, device: str) -> list[str]:
    """PCI addresses of the vendor's accelerators: classes 0x12 (accelerator), 0x03 (display)."""
    return [
        address
        for address in machine.names(PCI)
        if (machine.read(f"{PCI}/{address}/vendor") or "").strip() == VENDOR[device]
        and (machine.read(f"{PCI}/{address}/class") or "").startswith(("0x12", "0x03"))
    ]


def check_device_files(machine: Machine, device: str) -> Iterator[Finding]:
    chips = chip_files(machine, device)
    missing = [name for name in SHARED[device] if not machine.path(f"/dev/{name}").exists()]
    if chips and not missing:
        told = f"{len(chips)} chips: {', '.join(chips)}"
        yield Finding("devices.files", Severity.OK, told, ", ".join(SHARED[device]))
    else:
        yield _missing(machine, device, chips, missing)
    yield from _permissions(machine, [*chips, *SHARED[device]])
    if chips:
        yield _ray_chips(machine, device, len(chips))


def _missing(machine: Machine, device: str, chips: list[str], missing: list[str]) -> Finding:
    seen = cards(machine, device)
    first = CHIPS[device].pattern.replace(r"\d+", "0")
    expected = ", ".join(f"/dev/{name}" for name in (first, *SHARED[device]))
    remedy = (
        "load the driver; in a container pass each of these files with --device"
        if seen or chips
        else "use --device cpu here; a card that should be there: lspci, its seat and power"
    )
    found = f"no /dev/{', '.join(missing)}" if chips else "no chip in /dev"
    return Finding(
        id="devices.files",
        severity=Severity.ERROR,
        found=f"{found}; {len(seen)} cards on PCI",
        expected=expected,
        source=f"device files of the driver; {PCI}, vendor {VENDOR[device]}",
        remedy=remedy,
    )


def _permissions(machine: Machine, names: list[str]) -> Iterator[Finding]:
    closed, group, num_seen = [], -1, 0
    for name in names:
        try:
            status = os.stat(machine.path(f"/dev/{name}"))
        except OSError:
            continue
        num_seen += 1
        if not may_use(status, machine.uid, machine.groups):
            closed.append(name)
            group = status.st_gid
    if closed:
        name = group_name(machine, group)
        yield Finding(
            id="devices.permissions",
            severity=Severity.ERROR,
            found=f"user {machine.uid} may not open {', '.join(closed)}",
            expected="read and write",
            source="owner, group and mode of the device files",
            remedy=f"sudo usermod -aG {name} $USER, then log in again",
        )
    elif num_seen:
        yield Finding("devices.permissions", Severity.OK, f"{num_seen} files can be opened")


def may_use(status: os.stat_result, uid: int, groups: frozenset[int]) -> bool:
    """Whether the mode lets this user read and write, as the kernel decides without ACLs."""
    if uid == 0:
        return True
    if status.st_uid == uid:
        wanted = stat.S_IRUSR | stat.S_IWUSR
    elif status.st_gid in groups:
        wanted = stat.S_IRGRP | stat.S_IWGRP
    else:
        wanted = stat.S_IROTH | stat.S_IWOTH
    return status.st_mode & wanted == wanted


def group_name(machine: Machine, gid: int) -> str:
    for line in (machine.read("/etc/group") or "").splitlines():
        name, _, rest = line.partition(":")
        if rest.split(":")[1:2] == [str(gid)]:
            return name
    return str(gid)


def _ray_chips(machine: Machine, device: str, num_chips: int) -> Finding:
    """What a Ray started in this shell gives to ranks."""
    variable, resource = VISIBLE[device], RESOURCE[device]
    listed = machine.environ.get(variable)
    if listed is None:
        return Finding("ray.chips", Severity.OK, f"Ray will find {num_chips} {resource}")
    ids = [] if listed in EMPTY_LISTS else [part.strip() for part in listed.split(",")]
    wrong = [i for i in ids if not i.isdecimal()] if device == "npu" else []
    fits = bool(ids) and not wrong and len(ids) <= num_chips
    return Finding(
        id="ray.chips",
        severity=Severity.OK if fits else Severity.ERROR,
        found=f"{variable}={listed!r}, {num_chips} chips in /dev",
        expected=f"at most {num_chips} numbers of chips, at least one",
        source=f"Ray gives ranks the chips that {variable} lists",
        remedy="" if fits else f"unset {variable}, or list chips that are there",
    )
