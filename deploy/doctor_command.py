"""`nrank doctor`: whether this machine is fit to serve on a device, and what to do if it isn't."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.defaults import DEVICES, DTYPES, default_dtype
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
    parser.add_argument(
        "--ops",
        metavar="FILE",
        help="run every operator of the device against the reference at the model's shapes and "
        "write what came of it to FILE, for the setting ops_file",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="with --ops: the type to compute in")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from deploy.doctor.finding import must_fix, to_json
    from deploy.doctor.findings_text import as_text

    model_dir = model_path(arguments.model)
    if arguments.ops is not None:
        from deploy.doctor.operators import probe_operators

        dtype = arguments.dtype or default_dtype(arguments.device, model_dir)
        findings = probe_operators(arguments.device, model_dir, dtype, Path(arguments.ops))
    else:
        findings = examine(arguments.device, model_dir)
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
