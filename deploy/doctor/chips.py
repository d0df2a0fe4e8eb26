"""What the chips' own sensors say: health, errors of memory, heat, and who holds their memory.

Asks no device: a reading comes in.
"""

from __future__ import annotations

from collections.abc import Iterator

from deploy.doctor.finding import Finding, Severity
from deploy.doctor.machine import Machine
from deploy.doctor.ports import process_name
from rank_worker.device_sensors.reading import ChipReading, NodeReading

GIB = 1 << 30
WARM_CELSIUS = 85.0  # work that was held for heat goes on from here on down
HOT_CELSIUS = 94.0  # new work is held from here on
IDLE_BYTES = 2 * GIB  # 1.3 to 1.9 GB of an idle 310P are in use (public npu-smi captures)


def check_chips(machine: Machine, reading: NodeReading | None, num_files: int) -> Iterator[Finding]:
    """Findings of every chip; one line where no sensor answers. `num_files` chips are in /dev."""
    if reading is None or reading.error is not None or not reading.chips:
        told = reading.error if reading is not None and reading.error else "no sensor answers"
        yield Finding(
            id="chips.sensors",
            severity=Severity.WARNING if num_files else Severity.ABSENT,
            found=told,
            expected="DCMI or npu-smi, nvidia-ml-py for CUDA",
            source="heat, health and memory are read by them",
            remedy="run npu-smi info, in a container mount it; for CUDA pip install 'nrank[cuda]'",
        )
    if reading is None:
        return
    if reading.chips:
        told = f"{len(reading.chips)} chips, by {reading.source}"
        yield Finding("chips.sensors", Severity.OK, told)
        yield _count(reading, num_files)
    for chip in reading.chips:
        subject = f"card {chip.npu_id} chip {chip.chip_id}"
        look = f"nvidia-smi -q -i {chip.npu_id}"
        if reading.source != "nvml":
            look = f"npu-smi info -t {{}} -i {chip.npu_id}"
        yield _health(chip, subject, look.format("health"))
        yield _ecc(chip, subject, look.format("ecc-enable"), reading.source != "nvml")
        yield _heat(chip, subject, look.format("temp"))
        yield from _holders(machine, chip, subject, look.format("usages"))


def _count(reading: NodeReading, num_files: int) -> Finding:
    """A chip that fell off the bus keeps its device file; Ray would give a rank to it."""
    num_chips = len(reading.chips)
    told = f"{reading.source} tells of {num_chips} chips, /dev has {num_files}"
    expected = "as many device files as chips"
    if num_chips == num_files:
        return Finding("chips.count", Severity.OK, told, expected)
    if num_chips < num_files:
        remedy = "dmesg tells of a chip that fell off; reset its card or reboot, then look again"
    else:
        remedy = "load the driver again; in a container pass the file of each chip with --device"
    return Finding("chips.count", Severity.ERROR, told, expected, "the sensors and /dev", remedy)


def _health(chip: ChipReading, subject: str, look: str) -> Finding:
    grades = {
        "ok": Severity.OK,
        "warning": Severity.WARNING,
        "alarm": Severity.ERROR,
        "critical": Severity.ERROR,
    }
    severity = grades.get(chip.health or "", Severity.ABSENT)
    codes = f", codes {' '.join(chip.error_codes)}" if chip.error_codes else ""
    return Finding(
        id="chips.health",
        subject=subject,
        severity=severity,
        found=f"{chip.health or 'not told'}{codes}",
        expected="ok",
        source="the chip",
        remedy="" if severity is Severity.OK else f"{look}; then reset it with no user on the card",
    )


def _ecc(chip: ChipReading, subject: str, look: str, costs_memory: bool) -> Finding:
    single, double = chip.ecc_single_bit, chip.ecc_double_bit
    counts = {"corrected": single, "uncorrected": double}
    state = {True: "on", False: "off", None: "not told"}[chip.ecc_enabled]
    told = ", ".join([state, *(f"{n} {name}" for name, n in counts.items() if n is not None)])
    if double:
        severity, remedy = Severity.ERROR, "reset the card; replace it when they come back"
    elif single:
        severity, remedy = Severity.WARNING, "watch whether the number grows"
    elif chip.ecc_enabled and costs_memory:
        remedy = "plan with --ecc on and the memory that is left: --usable-bytes"
        severity = Severity.WARNING
    elif chip.ecc_enabled is None and single is None:
        severity, remedy = Severity.ABSENT, look
    else:
        severity, remedy = Severity.OK, ""
    expected = "no uncorrected errors" + ("; plans assume that it is off" if costs_memory else "")
    return Finding("chips.ecc", severity, told, expected, "the chip", remedy, subject)


def _heat(chip: ChipReading, subject: str, look: str) -> Finding:
    heat, limit = chip.temperature_celsius, chip.shutdown_celsius
    if heat is None:
        return Finding(
            "chips.temperature", Severity.ABSENT, "not told", f"below {HOT_CELSIUS:g} °C",
            "the chip", look, subject,
        )  # fmt: skip
    severity = Severity.OK
    if heat > WARM_CELSIUS:
        severity = Severity.ERROR if heat >= HOT_CELSIUS else Severity.WARNING
    own = f"; the chip's own limit is {limit:g} °C" if limit is not None else ""
    return Finding(
        id="chips.temperature",
        subject=subject,
        severity=severity,
        found=f"{heat:g} °C{own}",
        expected=f"at most {WARM_CELSIUS:g} °C at rest",
        source=f"new work is held from {HOT_CELSIUS:g} °C on",
        remedy="" if severity is Severity.OK else "fans, air flow, distance of the cards",
    )


def _holders(machine: Machine, chip: ChipReading, subject: str, look: str) -> Iterator[Finding]:
    """Who holds memory of the chip. Never ended from here: that is the user's to decide."""
    used = chip.memory_used_bytes
    source = "the driver's list; in a container its pids are those of the host"
    if chip.processes:
        told = ", ".join(
            f"pid {pid} ({process_name(machine, pid)}) {size / GIB:.1f} GiB"
            for pid, size in chip.processes
        )
        yield Finding(
            "chips.memory", Severity.WARNING, told, "no other process", source,
            "fine if this is your running server; else end it, then start", subject,
        )  # fmt: skip
    elif used is not None and used > IDLE_BYTES:
        yield Finding(
            "chips.memory", Severity.WARNING, f"{used / GIB:.1f} GiB in use by nobody seen here",
            f"below {IDLE_BYTES / GIB:g} GiB at rest", source,
            "look on the host: another container, or a process that was killed and not freed",
            subject,
        )  # fmt: skip
    elif used is None:
        yield Finding(
            "chips.memory", Severity.ABSENT, "not told", "", source,
            look, subject,
        )  # fmt: skip
    else:
        yield Finding(
            "chips.memory", Severity.OK, f"{used / GIB:.1f} GiB in use", "", source, "", subject
        )
