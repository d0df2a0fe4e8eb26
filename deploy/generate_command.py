"""`nrank generate`: answers of the engine without Ray or HTTP.

Prompts given as ids need no tokenizer; the text is null where the model directory has none.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from deploy.flags import (
    add_command,
    add_engine_flags,
    add_model_flag,
    add_run_flags,
    bounded,
    engine_config,
    refuse_missing_features,
)
from deploy.prompts import Job, ModelLimits, jobs_from_flags, jobs_from_lines
from placement.config import EngineConfig

if TYPE_CHECKING:
    from deploy.answers import Answer

FAILED = 1


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "generate",
        "Run prompts through the engine and print the answers.",
        'nrank generate --ranks 2 --chat "Count from 3 to 9." --max-tokens 40 --json',
    )
    add_model_flag(parser)
    add_engine_flags(parser)
    add_run_flags(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="S", help="raw text")
    prompt.add_argument("--chat", metavar="S", help="a user message, put into the chat template")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="token ids")
    prompt.add_argument("--requests", metavar="F.jsonl", help="one request a line, run together")
    parser.add_argument("--max-tokens", type=bounded(1), default=64, metavar="M")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    parser.add_argument("--seed", type=int, metavar="S", help="drawn and reported when absent")
    parser.add_argument("--stop", action="append", default=[], metavar="S", help="stop string")
    parser.add_argument("--ignore-eos", action="store_true", help="run on over end tokens")
    parser.add_argument("--json", action="store_true", help="print ids, usage and rates as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    refuse_missing_features(config)
    limits = ModelLimits.read(config)
    jobs = (
        jobs_from_lines(arguments, limits)
        if arguments.requests
        else jobs_from_flags(arguments, limits)
    )
    _ = limits.has_tokenizer  # a broken one is refused here rather than after the answer
    answers, stats = generate(config, jobs, limits)
    if arguments.json:
        results = [answer.to_json() for answer in answers]
        whole = {"results": results} if arguments.requests else results[0]
        print(json.dumps({**whole, "stats": stats}))
    else:
        for answer in answers:
            print(answer.printable())
        report_reuse(answers)
    return report_errors(answers)


def generate(
    config: EngineConfig, jobs: list[Job], limits: ModelLimits
) -> tuple[list[Answer], dict[str, Any]]:
    """Start a gang, run all jobs together, end the gang. On a terminal the load is shown."""
    from deploy.answers import Answer
    from deploy.chip_guard import guard_of
    from deploy.load_display import LoadDisplay, is_terminal
    from rank_worker.launch import launch_engine

    requests = [job.request(f"request-{index}", limits) for index, job in enumerate(jobs)]
    display = LoadDisplay(sys.stderr) if is_terminal(sys.stderr) else None
    with launch_engine(config, display.update if display else None, guard_of(config)) as engine:
        if display is not None:
            display.clear()
            for line in engine.start_report().lines():
                print(f"nrank: {line}", file=sys.stderr)
        results = engine.generate(requests)
        stats = engine.stats()
    pairs = zip(jobs, results, strict=True)
    return [Answer.make(job, result, limits) for job, result in pairs], stats


def report_reuse(answers: list[Answer]) -> None:
    """Says how much of the prompts was not computed again, if anything."""
    cached = sum(answer.cached_tokens for answer in answers)
    if cached:
        prompt = sum(len(answer.prompt_ids) for answer in answers)
        print(f"nrank: {cached} of {prompt} prompt tokens were cached", file=sys.stderr)


def report_errors(answers: list[Answer]) -> int:
    failed = [answer for answer in answers if answer.error]
    for answer in failed:
        print(f"nrank: {answer.request_id}: {answer.error}", file=sys.stderr)
    return FAILED if failed else 0
