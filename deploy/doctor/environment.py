"""Variables that make a run slow, loud or wrong, and Ray's version and token."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from deploy.doctor.finding import Finding, Severity
from deploy.doctor.machine import Machine

LOG_LEVEL = "ASCEND_GLOBAL_LOG_LEVEL"
LOG_LEVELS = {"0": "debug", "1": "info", "2": "warning", "3": "error", "4": "off"}
LOUD = ("0", "1")
# name -> (value that harms, what it does)
HARMFUL = {
    "ASCEND_SLOG_PRINT_TO_STDOUT": ("1", "device logs go into the logs of Ray"),
    "ASCEND_LAUNCH_BLOCKING": ("1", "each operator is waited for: for debugging only"),
    "TASK_QUEUE_ENABLE": ("2", "graphs can't be captured (public report on the 310P)"),
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": ("1", "all ranks land on chip 0"),
}


def check_environment(machine: Machine, device: str) -> Iterator[Finding]:
    if device == "npu":
        yield _log_level(machine)
        for name, (value, harm) in HARMFUL.items():
            if machine.environ.get(name) == value:
                yield Finding(
                    id="environment.variable",
                    subject=name,
                    severity=Severity.WARNING,
                    found=f"{name}={value}",
                    expected="not set",
                    source=harm,
                    remedy=f"unset {name}",
                )


def _log_level(machine: Machine) -> Finding:
    level = machine.environ.get(LOG_LEVEL, "")
    told = f"{LOG_LEVEL}={level} ({LOG_LEVELS.get(level, 'unknown')})" if level else "default"
    expected = "2 or 3 (3 is the default)"
    if not level or (level in LOG_LEVELS and level not in LOUD):
        return Finding("environment.log_level", Severity.OK, told, expected)
    return Finding(
        id="environment.log_level",
        severity=Severity.WARNING,
        found=told,
        expected=expected,
        source="public reports: about 2 MB of device log a step at debug level",
        remedy=f"unset {LOG_LEVEL}, and see how large ~/ascend/log is",
    )


def check_token(machine: Machine) -> Iterator[Finding]:
    """Ray's token authentication: on, and the token readable by its owner alone."""
    if machine.environ.get("RAY_AUTH_MODE", "token") != "token":
        yield Finding(
            "ray.token", Severity.WARNING, "off (RAY_AUTH_MODE)", "RAY_AUTH_MODE=token",
            "whoever reaches Ray's ports can run code", "unset RAY_AUTH_MODE",
        )  # fmt: skip
        return
    if machine.environ.get("RAY_AUTH_TOKEN"):
        yield Finding("ray.token", Severity.OK, "in the variable RAY_AUTH_TOKEN")
        return
    home = machine.environ.get("HOME") or str(Path.home())
    path = machine.environ.get("RAY_AUTH_TOKEN_PATH") or f"{home}/.ray/auth_token"
    try:
        mode = os.stat(machine.path(path)).st_mode
    except OSError:
        yield Finding("ray.token", Severity.OK, f"none yet; Ray makes {path} when it starts")
        return
    shared = bool(mode & (stat.S_IRWXG | stat.S_IRWXO))
    yield Finding(
        id="ray.token",
        severity=Severity.WARNING if shared else Severity.OK,
        found=f"{path}, mode {stat.S_IMODE(mode):04o}",
        expected="mode 0600",
        source="whoever has the token can run code in Ray",
        remedy=f"chmod 600 {path}" if shared else "",
    )
