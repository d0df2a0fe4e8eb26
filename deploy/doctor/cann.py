"""The CANN toolkit: where it is, its version, its environment, its kernels and added operators.

Read from its files alone: nothing of it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from deploy.doctor.compatibility import judge_cann
from deploy.doctor.finding import Finding, Severity
from deploy.doctor.machine import Machine
from deploy.doctor.version_text import groups, key_values, what_lacks

HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
BASE = "/usr/local/Ascend"
LATEST = (f"{BASE}/cann", f"{BASE}/ascend-toolkit/latest")  # since 9.0, and before
INFO_FILES = ("ascend_toolkit_install.info", "ascend_nnrt_install.info")
RUNNING = "_running_version"
COMPONENTS = ("opp_kernel", "opp", "hccl", "compiler")  # have to be of the runtime's version
OPERATORS_VARIABLE = "ASCEND_CUSTOM_OPP_PATH"
CHIP_FOLDER = "ascend310p"  # of the kernels for a 310P in an operator package


@dataclass(frozen=True)
class Cann:
    """One installed toolkit."""

    home: str
    version: str
    components: dict[str, str] = field(default_factory=dict)  # name -> version
    info: dict[str, str] = field(default_factory=dict)  # of the install_info file


def find_cann(machine: Machine) -> Cann | None:
    """The toolkit that the environment names, else the one that is installed."""
    named = [machine.environ[name] for name in HOME_VARIABLES if machine.environ.get(name)]
    rest = [f"{BASE}/{name}" for name in machine.names(BASE) if name.startswith("cann-")]
    for home in (*named, *LATEST, *reversed(rest)):
        found = _read(machine, home.rstrip("/"))
        if found is not None:
            return found
    return None


def _read(machine: Machine, home: str) -> Cann | None:
    folders = [home, *(f"{home}/{name}" for name in machine.names(home) if "-linux" in name)]
    infos = (machine.read(f"{folder}/{name}") for folder in folders for name in INFO_FILES)
    info = key_values(next((text for text in infos if text is not None), ""))
    running = key_values(machine.read(f"{home}/version.cfg") or "")
    components = {
        key.removesuffix(RUNNING): _external(value)
        for key, value in running.items()
        if key.endswith(RUNNING)
    }
    version = components.get("runtime") or info.get("version", "")
    return Cann(home, version, components, info) if version else None


def _external(value: str) -> str:
    """`[9.1.0.1.231:9.1.0]` -> 9.1.0"""
    found = groups(value)
    return found[0][0].rpartition(":")[2] if found else ""


def check_cann(machine: Machine) -> Iterator[Finding]:
    found = find_cann(machine)
    if found is None:
        yield Finding(
            id="cann.version",
            severity=Severity.ERROR,
            found=f"no CANN toolkit under {BASE} or {HOME_VARIABLES[0]}",
            expected="CANN toolkit and its 310P kernel package",
            source="torch_npu links against its libraries",
            remedy="install them, then source set_env.sh in the shell that starts nrank",
        )
        return
    yield _version(machine, found)
    yield _environment(machine, found)
    yield _components(machine, found)


def _version(machine: Machine, cann: Cann) -> Finding:
    told = f"CANN {cann.version} in {cann.home}"
    torch_npu = machine.version("torch_npu")
    if not torch_npu:
        return Finding("cann.version", Severity.OK, told)
    verdict = judge_cann(torch_npu, cann.version)
    remedies = {
        Severity.OK: "",
        Severity.WARNING: "run nrank generate once and compare; tell if it works",
        Severity.ERROR: f"install {verdict.expected}, or the torch_npu of CANN {cann.version}",
    }
    return Finding(
        id="cann.version",
        severity=verdict.severity,
        found=f"{told}, torch_npu {torch_npu}",
        expected=verdict.expected,
        source=verdict.source,
        remedy=remedies[verdict.severity],
    )


def _environment(machine: Machine, cann: Cann) -> Finding:
    expected = "ASCEND_HOME_PATH and LD_LIBRARY_PATH as set_env.sh sets them"
    set_env = f"source {cann.home}/set_env.sh before nrank (and before ray start)"
    for name in HOME_VARIABLES:
        value = machine.environ.get(name)
        if value and not machine.is_dir(value):
            return Finding(
                "cann.environment", Severity.ERROR, f"{name}={value}, no such folder", expected,
                cann.home, set_env,
            )  # fmt: skip
    libraries = machine.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    at_home = [path for path in libraries if path.startswith((cann.home, BASE))]
    if any(machine.environ.get(name) for name in HOME_VARIABLES) and at_home:
        return Finding("cann.environment", Severity.OK, f"set for {cann.home}", expected)
    return Finding(
        "cann.environment", Severity.ERROR, "not set in this shell", expected,
        "libhccl.so and others are found by it", set_env,
    )  # fmt: skip


def _components(machine: Machine, cann: Cann) -> Finding:
    """Kernels come in a package of their own; one of another version fails at the first step."""
    source = f"{cann.home}/version.cfg"
    if not cann.components:
        return Finding(
            "cann.kernels", Severity.ABSENT, what_lacks(machine.read(source), source), "", source,
            "see whether the kernel package of this CANN is installed",
        )  # fmt: skip
    runtime = cann.components.get("runtime", "")
    found = {name: cann.components.get(name, "") for name in COMPONENTS}
    kernels = found["opp_kernel"]
    wrong = [f"{name} {version}" for name, version in found.items() if version not in ("", runtime)]
    if kernels and not wrong:
        return Finding("cann.kernels", Severity.OK, f"opp_kernel {kernels}", runtime, source)
    return Finding(
        id="cann.kernels",
        severity=Severity.ERROR,
        found=", ".join(wrong) if wrong else "no kernel package",
        expected=f"all of version {runtime}",
        source=source,
        remedy=f"install the 310P kernel package (opp_kernel) of CANN {runtime}",
    )


def check_operators(machine: Machine) -> Iterator[Finding]:
    """Operator packages beside CANN's own: built for this chip, and there at all."""
    cann = find_cann(machine)
    listed = [p for p in machine.environ.get(OPERATORS_VARIABLE, "").split(os.pathsep) if p]
    vendors = f"{cann.home}/opp/vendors" if cann is not None else ""
    folders = [f"{vendors}/{n}" for n in machine.names(vendors)] if vendors else []
    packages = [*listed, *(folder for folder in folders if machine.is_dir(folder))]
    if not packages:
        yield Finding("operators.custom", Severity.OK, "none beside CANN's own")
    for path in packages:
        yield _operators(machine, path)


def _operators(machine: Machine, path: str) -> Finding:
    name = path.rstrip("/").rpartition("/")[2]
    if not machine.is_dir(path):
        return Finding(
            "operators.custom", Severity.ERROR, f"{path} does not exist", "an operator package",
            OPERATORS_VARIABLE, f"install it again, or take it out of {OPERATORS_VARIABLE}", name,
        )  # fmt: skip
    kernels = f"{path}/op_impl/ai_core/tbe/config"
    chips = machine.names(kernels)
    version = key_values(machine.read(f"{path}/version.info") or "").get("Version", "unknown")
    told = f"{path}, version {version}, kernels for {', '.join(chips) or 'no chip'}"
    if CHIP_FOLDER in chips:
        return Finding("operators.custom", Severity.OK, told, subject=name)
    return Finding(
        "operators.custom", Severity.WARNING, told, f"kernels for {CHIP_FOLDER}",
        kernels, "build it for the 310P, or remove it: its operators can't run", name,
    )  # fmt: skip
