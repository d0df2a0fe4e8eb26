"""`nrank doctor`: whether this machine is fit to serve on a device, and what to do if it isn't."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from deploy.defaults import DEVICES
from deploy.flags import add_command, add_model_flag, model_path

if TYPE_CHECKING:
    from deploy.doctor.finding import Finding

HEALTHY, MUST_FIX = 0, 1
FIRST_DEVICE = "npu"  # what nrank is for; `--device cpu` asks about this machine without chips


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "doctor",
        "Check versions, driver, chips, memory, disks and ports; exits 1 when something must be "
        "fixed.",
        "nrank doctor --device cpu --model /models/my-model --json",
    )
    add_model_flag(parser)
    parser.add_argument(
        "--device", choices=DEVICES, default=FIRST_DEVICE, help="device to check for (default npu)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from deploy.doctor.finding import must_fix, to_json
    from deploy.doctor.findings_text import as_text

    findings = examine(arguments.device, model_path(arguments.model))
    if arguments.json:
        print(json.dumps(to_json(arguments.device, findings)))
    else:
        print("\n".join(as_text(arguments.device, findings)))
    return MUST_FIX if must_fix(findings) else HEALTHY


def examine(device: str, model_dir: str) -> list[Finding]:
    """All findings of this machine."""
    from deploy.doctor.checks import Question, run_checks
    from deploy.doctor.machine import Machine
    from deploy.doctor.sensors import read_sensors

    question = Question(Machine(), device, model_dir, lambda: read_sensors(device))
    return list(run_checks(question))
