"""The `nrank` command: parses, dispatches, and turns errors into one line and an exit code.

Owns no behaviour of a command: each has its module `deploy/<name>_command.py` with `add_parser` and
`run`, and imports what it needs when it runs, so that `plan` works without torch and `generate`
without ray.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from deploy import (
    bench_command,
    certify_command,
    check_quality_command,
    doctor_command,
    eval_command,
    generate_command,
    inspect_command,
    plan_command,
    probe_command,
    quantize_command,
    report_command,
    serve_command,
)
from placement.errors import CheckpointError, ClientError, ConfigError, NrankError, PlanError

DONE, FAILED, BAD_INPUT, DOES_NOT_FIT, INTERRUPTED = 0, 1, 2, 3, 130
COMMANDS = (
    serve_command, generate_command, plan_command, inspect_command, doctor_command,
    probe_command, report_command, bench_command, eval_command, certify_command,
    check_quality_command, quantize_command,
)  # fmt: skip
TOP_LEVEL_NAMES = ("placement", "ops", "rank_worker", "cluster")


class Parser(argparse.ArgumentParser):
    """Errors in one line with the remedy, instead of a usage block."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="nrank",
        description="Serve hybrid mixture-of-experts models on many small accelerators.",
        epilog="example: nrank serve --port 8000",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    # torch would load torch_npu by itself, in each process, and not load where CANN is missing.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        arguments = make_parser().parse_args(argv)
        refuse_shadowed_packages()
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, a pager or `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except NrankError as error:
        print(f"nrank: {' '.join(str(error).split())}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        print("nrank: interrupted", file=sys.stderr)
        return INTERRUPTED


def exit_code(error: NrankError) -> int:
    if isinstance(error, PlanError):
        return DOES_NOT_FIT
    if isinstance(error, ConfigError | CheckpointError | ClientError):
        return BAD_INPUT
    return FAILED


def refuse_shadowed_packages() -> None:
    """Our top-level names are ordinary words; say so when another distribution took one."""
    home = Path(__file__).resolve().parents[1]
    for name in TOP_LEVEL_NAMES:
        spec = find_spec(name)
        found = spec.origin if spec is not None and spec.origin else "nowhere"
        if Path(found).resolve().parent.parent != home:
            raise ConfigError(
                f"`import {name}` finds {found}, not nrank's own package in {home}; uninstall the "
                f"distribution that brings it or use a clean environment"
            )


if __name__ == "__main__":
    sys.exit(main())
