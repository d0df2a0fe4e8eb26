"""All checks of one device, in the order in which a person would fix things.

Owns the order and what is asked for which device; each area has its module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deploy.defaults import BUILT_IN_DEVICES
from deploy.doctor.cann import check_cann, check_operators
from deploy.doctor.chips import check_chips
from deploy.doctor.device_files import CHIPS, check_device_files, chip_files
from deploy.doctor.driver import check_driver
from deploy.doctor.environment import check_environment, check_token
from deploy.doctor.finding import Finding, Severity
from deploy.doctor.imports import check_imports
from deploy.doctor.machine import Machine
from deploy.doctor.memory import check_memory
from deploy.doctor.packages import check_forbidden, check_packages, check_python
from deploy.doctor.pcie import check_pcie
from deploy.doctor.ports import check_ports
from deploy.doctor.storage import check_storage
from rank_worker.device_sensors.reading import NodeReading


@dataclass(frozen=True)
class Question:
    """What to look at: the machine, for which device and model, and what its sensors said."""

    machine: Machine
    device: str
    model_dir: str
    read_sensors: Callable[[], NodeReading | None]


def run_checks(question: Question) -> Iterator[Finding]:
    """Findings one after the other: a slow check holds back only those behind it."""
    machine, device, model_dir = question.machine, question.device, question.model_dir
    yield _built(device)
    yield from check_python(machine)
    yield from check_packages(machine, device)
    yield from check_forbidden(machine, device)
    yield from check_imports(machine, device)
    if device == "npu":
        yield from check_driver(machine)
        yield from check_cann(machine)
        yield from check_operators(machine)
    if device in CHIPS:
        yield from check_device_files(machine, device)
        yield from check_pcie(machine, device)
        num_files = len(chip_files(machine, device))
        yield from check_chips(machine, question.read_sensors(), num_files)
    yield from check_environment(machine, device)
    yield from check_memory(machine, device, model_dir)
    yield from check_storage(machine, model_dir)
    yield from check_ports(machine)
    yield from check_token(machine)


def _built(device: str) -> Finding:
    """No fault of the machine, so no error: it can be made ready for the version that has it."""
    expected = f"one of {', '.join(BUILT_IN_DEVICES)}"
    if device in BUILT_IN_DEVICES:
        return Finding("nrank.backend", Severity.OK, device, expected)
    return Finding(
        id="nrank.backend",
        severity=Severity.WARNING,
        found=f"this version can plan for {device} and not run on it",
        expected=expected,
        source="nrank",
        remedy="nothing on this machine; nrank serve --device cpu runs here",
    )
