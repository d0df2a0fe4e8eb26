"""`nrank eval`: quality of what a server answers. `gpqa` runs and resumes, `report` tells a run."""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.flags import add_command, bounded
from placement.errors import ConfigError
from placement.whole_file import write_whole

if TYPE_CHECKING:
    from deploy.gpqa.evaluation import Plan

DONE, FAILED = 0, 1
REPORT = "report.json"
JOB_COPY = "working_dir_files"  # of the path where Ray unpacks a job's --working-dir
METRICS_PORT = 9465  # where deploy/monitoring/prometheus.yml looks
MAX_SEED = 2**64 - 1  # as `cluster.protocol` takes them
MAX_COUNT = 2**31 - 1  # of tokens
MAX_CONCURRENCY = 4096  # each is a task and a connection
PRESET_NAMES = ("aisbench", "simple-evals", "lm-eval")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "eval",
        "Ask a server the questions of a benchmark, and report.",
        "nrank eval gpqa --base-url http://127.0.0.1:8000 --data gpqa_diamond.csv --out runs/first",
    )
    kinds = parser.add_subparsers(dest="eval", metavar="WHAT", required=True)
    _add_gpqa(kinds)
    _add_report(kinds)


def _add_gpqa(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        kinds,
        "gpqa",
        "Multiple-choice questions of a CSV file in GPQA's schema. The same command resumes a run "
        "that was interrupted or killed.",
        "nrank eval gpqa --base-url http://127.0.0.1:8000 --data gpqa_diamond.csv --out runs/first",
    )
    add = parser.add_argument
    add("--base-url", required=True, metavar="U", help="of an OpenAI-compatible server")
    add("--data", required=True, metavar="F", help="CSV of questions; none comes with nrank")
    add("--out", required=True, metavar="D", help="folder of the run: ledger and report")
    add("--model", metavar="ID", help="model to ask (default: the only one served)")
    add("--preset", choices=PRESET_NAMES, default=PRESET_NAMES[0],
        help="prompt and order of options (default aisbench)")  # fmt: skip
    add("--limit", type=bounded(1), metavar="N", help="the first N questions only")
    add(
        "--concurrency",
        type=bounded(1, MAX_CONCURRENCY),
        default=4,
        metavar="N",
        help="at a time (default 4)",
    )
    add("--max-tokens", type=bounded(1, MAX_COUNT), default=8192, metavar="N",
        help="of an answer, reasoning included (default 8192)")  # fmt: skip
    add("--temperature", type=number(0, 2), default=0.0, metavar="T", help="default 0: greedy")
    add("--top-p", type=number(0, 1), metavar="P", help="default: the server's")
    add("--top-k", type=bounded(1, MAX_COUNT), metavar="K", help="default: the server's")
    add("--seed", type=bounded(0, MAX_SEED), default=1024, metavar="S",
        help="of every answer (default 1024)")  # fmt: skip
    add("--timeout", type=number(0.1), default=3600.0, metavar="S",
        help="seconds for one answer, holds included (default 3600)")  # fmt: skip
    add("--retries", type=bounded(0), default=2, metavar="N",
        help="more attempts after one that failed (default 2)")  # fmt: skip
    add("--away", type=number(0), default=1800.0, metavar="S",
        help="seconds to wait for a server that restarts (default 1800)")  # fmt: skip
    add("--metrics-port", type=bounded(0), default=METRICS_PORT, metavar="P",
        help=f"of this run's own /metrics (default {METRICS_PORT}; 0: a free one)")  # fmt: skip
    parser.set_defaults(run=run_gpqa)


def _add_report(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        kinds,
        "report",
        "Figures of a run, also while it goes on; paired with another run on the same questions.",
        "nrank eval report --out runs/second --against runs/first",
    )
    parser.add_argument("--out", required=True, metavar="D", help="folder of the run")
    parser.add_argument("--against", metavar="D", help="folder of another run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_report)


class Number:
    """Argument type: a finite number within bounds."""

    def __init__(self, minimum: float, maximum: float) -> None:
        self.minimum, self.maximum = minimum, maximum

    def __call__(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not self.minimum <= value <= self.maximum:
            raise argparse.ArgumentTypeError(
                f"{text} is not within {self.minimum:g} and {self.maximum:g}"
            )
        return value


def number(minimum: float, maximum: float = 1e9) -> Number:
    return Number(minimum, maximum)


def run_gpqa(arguments: argparse.Namespace) -> int:
    """0 when every question has its answer, 1 when some failed."""
    from deploy.gpqa.evaluation import evaluate
    from deploy.gpqa.report_text import report_json, report_lines

    plan = make_plan(arguments)
    try:
        report = evaluate(plan)
    except KeyboardInterrupt:
        print("nrank: the same command resumes the run", file=sys.stderr)
        raise
    try:
        print("\n".join(report_lines(report)), flush=True)
    finally:  # whoever reads may close the pipe
        is_written = write_report(plan.folder / REPORT, report_json(report))
    if report.failures:
        print(
            f"nrank: {len(report.failures)} of {report.header.questions} questions have no answer; "
            f"the same command asks them again",
            file=sys.stderr,
        )
    return DONE if is_written and not report.failures else FAILED


def write_report(path: Path, report: dict[str, Any]) -> bool:
    """Whether it could be; the ledger has all of it."""
    try:
        write_whole(path, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        print(
            f"nrank: {path} can't be written: {error.strerror}; make room, the same command asks "
            f"nothing again",
            file=sys.stderr,
        )
        return False
    return True


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Reads the questions. ConfigError for what can't be used."""
    from deploy.gpqa import extract
    from deploy.gpqa.asker import Patience
    from deploy.gpqa.dataset import read_dataset
    from deploy.gpqa.evaluation import Plan
    from deploy.gpqa.presets import PRESETS, make_prompts
    from deploy.gpqa.records import Header

    refuse_lost_folder(arguments.out)
    dataset = read_dataset(arguments.data)
    questions = dataset.questions[: arguments.limit]
    preset = PRESETS[arguments.preset]
    header = Header(
        run_id=uuid.uuid4().hex[:12],
        created_at=time.time(),
        dataset_sha256=dataset.sha256,
        questions=len(questions),
        preset=preset.name,
        preset_sha256=preset.sha256,
        extractor=extract.VERSION,
        model="",
        plan_id="",
        server_revision="",
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
    )
    return Plan(
        folder=Path(arguments.out),
        base_url=arguments.base_url,
        model=arguments.model,
        header=header,
        prompts=make_prompts(preset, questions),
        concurrency=arguments.concurrency,
        timeout_s=arguments.timeout,
        patience=Patience(arguments.retries, arguments.away),
        metrics_port=arguments.metrics_port,
    )


def refuse_lost_folder(folder: str) -> None:
    """A Ray job works in a copy of its directory that Ray deletes: a ledger there can't resume."""
    if JOB_COPY in Path.cwd().parts and not Path(folder).is_absolute():
        raise ConfigError(
            f"--out {folder} would lie in the job's own copy of the directory, which Ray deletes; "
            f"give an absolute path"
        )


def run_report(arguments: argparse.Namespace) -> int:
    from deploy.gpqa.comparison import compare
    from deploy.gpqa.ledger import read_ledger
    from deploy.gpqa.report import make_report
    from deploy.gpqa.report_text import comparison_lines, report_json, report_lines

    contents = read_ledger(arguments.out)
    report = make_report(contents)
    comparison = None
    if arguments.against is not None:
        comparison = compare(contents, read_ledger(arguments.against))
    if arguments.json:
        print(json.dumps(report_json(report, comparison)))
        return DONE
    print("\n".join(report_lines(report)))
    if comparison is not None:
        print("\n".join(comparison_lines(comparison)))
    return DONE
