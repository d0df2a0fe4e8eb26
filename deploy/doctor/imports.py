"""Whether torch, and torch_npu with it, can be loaded at all; tried in a process of its own.

The loader's own words are kept: undefined symbols and missing libraries name the wrong pair.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from deploy.doctor.finding import Finding, Severity
from deploy.doctor.machine import Machine

LIMIT_S = 60.0  # torch_npu takes 5 s of CPU, more from a cold disk
MAX_CHARACTERS = 400
MODULES = {"cpu": ("torch",), "cuda": ("torch",), "npu": ("torch", "torch_npu")}


def check_imports(machine: Machine, device: str) -> Iterator[Finding]:
    for name in MODULES[device]:
        if machine.version(name):
            yield _try(machine, name, device)


def _try(machine: Machine, name: str, device: str) -> Finding:
    try:
        error = import_error(machine, name)
    except subprocess.TimeoutExpired:  # a machine that is busy, or a loader that hangs
        return Finding(
            "packages.import", Severity.WARNING, f"did not end within {LIMIT_S:g} s",
            f"import {name}", "the loader", f"try it by hand: python -c 'import {name}'", name,
        )  # fmt: skip
    if not error:
        return Finding("packages.import", Severity.OK, "can be loaded", subject=name)
    remedy = f"make versions fit (see above), then reinstall {name}"
    if name == "torch" and device != "npu" and machine.version("torch_npu"):
        remedy = "torch loads torch_npu by itself: uninstall it here, or install CANN"
    if name == "torch_npu":
        remedy = "source set_env.sh of CANN; versions that fit: see above"
    return Finding(
        "packages.import", Severity.ERROR, error, f"import {name}", "the loader", remedy, name
    )


def import_error(machine: Machine, name: str) -> str:
    """The last line that `import name` says in another process, "" when it succeeds.

    TimeoutExpired when that takes longer than LIMIT_S; the process has ended then, too.
    """
    # Only torch_npu's own import tells its own error: torch would put it into its words.
    own = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if name == "torch_npu" else {}
    places = os.pathsep.join(place for place in machine.packages if place)
    environ = {**machine.environ, "PYTHONPATH": places, **own}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", f"import {name}"],  # never from where the user stands
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environ,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, told = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode == 0:
        return ""
    if process.returncode < 0:
        return f"import {name} was ended by {signal.Signals(-process.returncode).name}"
    lines = told.strip().splitlines()
    return (lines[-1] if lines else f"exit status {process.returncode}")[:MAX_CHARACTERS]
