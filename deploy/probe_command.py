"""`nrank probe`: where a gang stops computing what its model should, by layer and rank."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.certify_command import terminated_as_interrupted
from deploy.defaults import COMMS, DEVICES, DTYPES
from deploy.flags import (
    add_command,
    add_model_flag,
    bounded,
    engine_config,
    refuse_missing_features,
)
from placement.errors import ConfigError

if TYPE_CHECKING:
    from rank_worker.launch import RankMaker

DONE, FAILED = 0, 1
NEW_TOKENS = 5  # the prefill's own and four decode steps
PROMPT = (
    "The lighthouse stood at the end of a narrow road. Every evening at six, Anna counted the "
    "boats (seven, eight, sometimes nine) and wrote the number on a page: 7 8 9 7 8. What did she "
    "do when the fog came in? def count(boats): return len([b for b in boats if b.is_home])"
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "probe",
        "Run a prompt and compare every layer of every rank with a plain reference; exits 1 when "
        "something is flagged.",
        'nrank probe --model /models/my-model --ranks 2 --prompt "Once upon a time"',
    )
    add_model_flag(parser)
    parser.add_argument("--ranks", type=bounded(1), metavar="N", help="number of ranks (1)")
    parser.add_argument("--device", choices=DEVICES, help="backend (default cpu)")
    parser.add_argument("--dtype", choices=DTYPES, help="type that weights run in")
    parser.add_argument("--comm", choices=COMMS, help="collectives (default auto)")
    parser.add_argument("--prefill-chunk", type=bounded(1), metavar="N", help="largest chunk")
    parser.add_argument(
        "--ownership", metavar="FILE", help="experts by rank, as nrank plan --json writes"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="S", help="raw text (default: a fixed one)")
    prompt.add_argument("--prompt-file", metavar="F", help="the same from a file")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="token ids")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(
        run=run, chat=None, max_tokens=NEW_TOKENS, temperature=0.0, seed=None, stop=(),
        ignore_eos=True,
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    from rank_worker.layer_tap import TappedRank

    return probe(arguments, TappedRank)


def probe(arguments: argparse.Namespace, make_rank: RankMaker) -> int:
    """`make_rank` makes the ranks of the gang, with a tap."""
    from deploy.load_display import LoadDisplay, is_terminal
    from deploy.probe.comparison import compare
    from deploy.probe.recording import recorded
    from deploy.probe.report_text import report_lines
    from deploy.prompts import ModelLimits, jobs_from_flags
    from deploy.redrawn_line import RedrawnLine

    config = engine_config(arguments)
    refuse_missing_features(config)
    if arguments.prompt_file is not None:
        arguments.prompt = read_prompt(arguments.prompt_file)
    elif arguments.prompt is None:
        arguments.prompt = PROMPT
    job = jobs_from_flags(arguments, ModelLimits.read(config))[0]
    display, line = LoadDisplay(sys.stderr), RedrawnLine(sys.stderr)
    on_progress = display.update if is_terminal(sys.stderr) else None

    def on_layer(done: int, layers: int) -> None:
        if line.redraws:
            line.draw(f"layer {done} of {layers}")

    with (
        terminated_as_interrupted(),
        recorded(config, job, on_progress, make_rank, display.clear) as recording,
    ):
        try:
            report = compare(recording, config.model_dir, on_layer)
        finally:
            line.clear()
    print(json.dumps(report.to_json()) if arguments.json else "\n".join(report_lines(report)))
    return FAILED if report.findings else DONE


def read_prompt(path: str) -> str:
    from placement.headers import require_regular

    try:
        require_regular(path)
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"can't read {path}: {reason}; check --prompt-file") from error
