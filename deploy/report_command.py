"""`nrank report`: one file with all that a question about this server needs, without secrets."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from deploy.flags import add_command, add_model_flag, model_path
from deploy.server_json import is_url
from placement.errors import ConfigError
from placement.whole_file import require_place

DEFAULT_URL = "http://127.0.0.1:8000"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "report",
        "Pack versions, findings, configuration, plan, status and rank logs, without secrets and "
        "prompts.",
        "nrank report --url http://127.0.0.1:8000 --out report.tar.gz",
    )
    parser.add_argument("--out", metavar="FILE", help="default nrank-report-DATE.tar.gz")
    parser.add_argument(
        "--url", metavar="BASE", default=DEFAULT_URL,
        help=f"of the running server (default {DEFAULT_URL})",
    )  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="of a server that does not answer")
    add_model_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from deploy.config import load_config
    from deploy.redaction import Redactor
    from deploy.report_archive import write_archive
    from deploy.report_parts import collect

    if not is_url(arguments.url):
        raise ConfigError(f"--url {arguments.url!r} is no URL; write it like {DEFAULT_URL}")
    out = _place(arguments.out)
    overrides = {"model": model_path(arguments.model)} if arguments.model is not None else {}
    config = load_config(arguments.config, overrides)
    redactor = Redactor(os.environ, token_files())
    parts = collect(config, arguments.url)
    write_archive(out, parts.files, redactor)
    for name, reason in parts.missing.items():
        print(f"nrank: report lacks {name}: {redactor.text(reason)}", file=sys.stderr)
    print(out)
    return 0


def _place(out: str | None) -> Path:
    """Where the archive goes; refused before minutes are spent on it."""
    name = out or time.strftime("nrank-report-%Y%m%d-%H%M%S.tar.gz")
    require_place("--out", name)
    return Path(name)


def token_files() -> Iterator[str]:
    """The content of token files whose place is known; logs may quote it."""
    places = (
        os.environ.get("RAY_AUTH_TOKEN_PATH", ""),
        os.environ.get("HF_TOKEN_PATH", ""),
        str(Path.home() / ".ray" / "auth_token"),
        str(Path.home() / ".cache" / "huggingface" / "token"),
    )
    for place in places:
        try:
            if place and os.path.isfile(place):
                yield Path(place).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
