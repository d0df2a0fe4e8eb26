"""Python and the packages of its environment: versions by metadata, and those that must not be.

Nothing is imported: torch_npu breaks the process where CANN is missing.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from deploy.doctor.compatibility import FORBIDDEN
from deploy.doctor.finding import Finding, Severity
from deploy.doctor.machine import Machine
from deploy.doctor.version_text import series

OURS = "nrank"
FLOOR = ">=3.11"  # where our own metadata can't be read
PYTHON_WITH_WHEELS = "<3.15"  # 3.10 to 3.14 have wheels of torch_npu
NEEDED = {
    "cpu": ("torch", "ray", "transformers", "safetensors"),
    "cuda": ("torch", "ray", "transformers", "safetensors"),
    "npu": ("torch", "torch_npu", "ray", "transformers", "safetensors"),
}


def check_python(machine: Machine, version: str = "") -> Iterator[Finding]:
    found = version or platform.python_version()
    own = machine.distribution(OURS)
    floor = str((own.metadata["Requires-Python"] if own is not None else None) or FLOOR)
    fits, wheels = found in SpecifierSet(floor), found in SpecifierSet(PYTHON_WITH_WHEELS)
    yield Finding(
        id="python.version",
        severity=Severity.OK if fits and wheels else Severity.WARNING if fits else Severity.ERROR,
        found=found,
        expected=f"{floor},{PYTHON_WITH_WHEELS}",
        source="nrank's metadata; Pythons that torch_npu has wheels for",
        remedy="" if fits and wheels else "make the environment with Python 3.11: make venv",
    )


def check_packages(machine: Machine, device: str) -> Iterator[Finding]:
    """The packages that matter for a start, against what nrank and torch_npu ask for."""
    for name in NEEDED[device]:
        yield _package(machine, name)
    if device == "cuda" and machine.version("torch").endswith("+cpu"):
        yield Finding(
            id="packages.build",
            subject="torch",
            severity=Severity.ERROR,
            found=machine.version("torch"),
            expected="a build with CUDA",
            source="the wheel's own version",
            remedy="install torch of the same version from PyPI, without the CPU index",
        )
    if machine.version("torch_npu"):
        yield _torch_of_torch_npu(machine)


def _package(machine: Machine, name: str) -> Finding:
    version = machine.version(name)
    wanted = requirements(machine, OURS).get(name, SpecifierSet())
    source = "nrank's metadata" if str(wanted) else ""
    extra = "nrank[npu]" if name == "torch_npu" else OURS
    remedy = f"pip install '{extra}', or {name}{wanted}"
    if not version:
        expected = f"{name}{wanted}"
        return Finding(
            "packages.version", Severity.ERROR, "not installed", expected, source, remedy, name
        )
    fits = is_in(version, wanted)
    # torch_npu and its torch are chosen by the CANN of the machine: another pair may be right.
    lenient = name == "torch_npu" or (name == "torch" and bool(machine.version("torch_npu")))
    bad = Severity.WARNING if lenient else Severity.ERROR
    return Finding(
        id="packages.version",
        subject=name,
        severity=Severity.OK if fits else bad,
        found=version,
        expected=f"{name}{wanted}",
        source=source,
        remedy="" if fits else remedy,
    )


def _torch_of_torch_npu(machine: Machine) -> Finding:
    """torch_npu is linked against one torch: another ends in undefined symbols."""
    torch, torch_npu = machine.version("torch"), machine.version("torch_npu")
    wanted = requirements(machine, "torch_npu").get("torch", SpecifierSet())
    source = "torch_npu's metadata"
    if not str(wanted):
        release = series(torch_npu)
        wanted = SpecifierSet(f"=={release}.*" if release else "")
        source = "torch_npu X.Y is built for torch X.Y"
    fits = bool(torch) and is_in(torch, wanted)
    return Finding(
        id="torch_npu.torch",
        severity=Severity.OK if fits else Severity.ERROR,
        found=f"torch {torch or 'not installed'} beside torch_npu {torch_npu}",
        expected=f"torch{wanted}",
        source=source,
        remedy="" if fits else f"pip install 'torch{wanted}', or the torch_npu of this torch",
    )


def check_forbidden(machine: Machine, device: str) -> Iterator[Finding]:
    """Packages that break this device, whether pip knows them or only their folder is left."""
    clean = True
    for name, reason in FORBIDDEN.get(device, {}).items():
        for place in _places(machine, name):
            clean = False
            yield Finding(
                id="packages.forbidden",
                subject=name,
                severity=Severity.ERROR,
                found=place,
                expected="not there",
                source=reason,
                remedy=f"pip uninstall {name}, then remove what is left of its folder",
            )
    if clean and device in FORBIDDEN:
        names = ", ".join(FORBIDDEN[device])
        yield Finding("packages.forbidden", Severity.OK, f"none of {names}")


def _places(machine: Machine, name: str) -> list[str]:
    """Folders of that name on the search path, else the installed version."""
    folders = [f"{base}/{name}" for base in machine.packages if base]
    found = [folder for folder in folders if machine.on_search_path(folder)]
    version = machine.version(name)
    return found or ([f"{name} {version}"] if version else [])


def requirements(machine: Machine, distribution: str) -> dict[str, SpecifierSet]:
    """Name -> versions that a distribution's metadata asks for, those of its extras too."""
    own = machine.distribution(distribution)
    found: dict[str, SpecifierSet] = {}
    for text in (own.requires or []) if own is not None else []:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # of another packaging tool; pip would have refused it
        found[requirement.name] = requirement.specifier
    return found


def is_in(version: str, wanted: SpecifierSet) -> bool:
    """Whether the version is in the set; a local build label ("+cpu") has no say."""
    try:
        return wanted.contains(Version(version).public, prereleases=True)
    except ValueError:  # of packaging, or of int() for thousands of digits
        return False
