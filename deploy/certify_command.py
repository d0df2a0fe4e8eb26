"""`nrank certify`: which context length a model, a plan and this machine hold, as evidence."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.flags import (
    add_command,
    add_engine_flags,
    add_model_flag,
    add_run_flags,
    bounded,
    given,
    model_path,
    refuse_missing_features,
)
from placement.errors import ConfigError

if TYPE_CHECKING:
    from placement.config import EngineConfig
    from placement.evidence import Asked
    from placement.plan import Plan

DONE, FAILED = 0, 1
FIRST_LENGTH = 512
DEPTHS = (0, 25, 50, 75, 100)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "certify",
        "Run context lengths to their end (a code found in a long text, the same by reuse, after a "
        "restart and with all sequences at once) and write down what passed. The same command goes "
        "on with a run that was interrupted.",
        "nrank certify --ranks 2 --lengths 512,1024,2048 --out evidence.json",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the server's YAML file; flags override it"
    )
    add_model_flag(parser)
    add_engine_flags(parser)
    add_run_flags(parser)
    add = parser.add_argument
    add("--lengths", type=numbers(1), metavar="512,1024",
        help="tokens of prompt and answer (default: 512, doubled up to the context)")  # fmt: skip
    add("--depths", type=numbers(0, 100), default=DEPTHS, metavar="0,50,100",
        help="percent of the text before the code (default 0,25,50,75,100)")  # fmt: skip
    add("--max-tokens", type=bounded(1), default=64, metavar="M",
        help="room for an answer, reasoning included (default 64)")  # fmt: skip
    add("--out", default="evidence.json", metavar="FILE", help="default evidence.json")
    add("--overwrite", action="store_true", help="begin anew where FILE is of something else")
    parser.set_defaults(run=run)


class Numbers:
    """Argument type: different whole numbers within bounds, separated by commas; sorted."""

    def __init__(self, minimum: int, maximum: int) -> None:
        self.minimum, self.maximum = minimum, maximum

    def __call__(self, text: str) -> tuple[int, ...]:
        found = [bounded(self.minimum)(part) for part in text.split(",")]
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{text!r} names a number twice")
        if max(found) > self.maximum:
            raise argparse.ArgumentTypeError(f"{max(found)} is above {self.maximum}")
        return tuple(sorted(found))


def numbers(minimum: int, maximum: int = 1 << 40) -> Numbers:
    return Numbers(minimum, maximum)


def run(arguments: argparse.Namespace) -> int:
    """0 when every cell that was asked for passed, else 1."""
    from deploy.certify.binding import binding_of
    from deploy.certify.evidence_file import EvidenceFile, require_usable
    from deploy.certify.needles import make_prompts, prompts_sha256
    from deploy.certify.progress import Progress, table
    from deploy.prompts import ModelLimits
    from placement.evidence import Evidence
    from placement.prepare import prepare

    config, model_name = read_config(arguments)
    refuse_missing_features(config)
    plan = prepare(config).plan
    asked = wanted_work(arguments, plan)
    require_usable(Path(arguments.out), arguments.overwrite)
    limits = ModelLimits.read(config)
    if not limits.tokenizer.has_template:
        raise ConfigError(f"{config.model_dir} has no chat template, which certify asks by")
    prompts = make_prompts(limits.tokenizer, asked)
    asked = replace(asked, prompts_sha256=prompts_sha256(prompts))
    wanted = Evidence(model_name, binding_of(config, plan.plan_id), asked)
    # Bring torch: what can be refused without it is refused in a second.
    from deploy.certify.certification import Answers, Certification, Pool
    from deploy.certify.gangs import gang_starter

    progress = Progress(sys.stderr)
    with closing(EvidenceFile(Path(arguments.out), wanted, arguments.overwrite)) as file:
        if count := len(file.evidence.cells):
            print(f"nrank: {arguments.out} has {count} cells already", file=sys.stderr)
        work = Certification(
            file,
            prompts,
            Answers(limits.tokenizer.decode, limits.end_token_ids),
            gang_starter(config, progress.clear),
            Pool(plan.num_pages, plan.page_tokens, plan.prefix.device > 0),
            progress.update,
        )
        with terminated_as_interrupted():
            try:
                evidence = work.run()
            except KeyboardInterrupt:
                print("nrank: the same command goes on with the next cell", file=sys.stderr)
                raise
            finally:
                progress.clear()
    print("\n".join(table(evidence)))
    return DONE if not evidence.limit_reason else FAILED


def read_config(arguments: argparse.Namespace) -> tuple[EngineConfig, str]:
    """As `serve` reads file and flags, so that the plan is the server's; and the model's name."""
    from deploy.config import load_config

    overrides = given(arguments)
    if arguments.model is not None:
        overrides["model"] = model_path(arguments.model)
    config = load_config(arguments.config, overrides)
    return config.engine(), config.model_name


def wanted_work(arguments: argparse.Namespace, plan: Plan) -> Asked:
    """Without the prompts' hash. ConfigError for lengths above the context or the answer's."""
    from placement.evidence import Asked

    context = plan.context.configured_tokens
    lengths = arguments.lengths or default_lengths(context)
    if lengths[-1] > context:
        raise ConfigError(
            f"--lengths {lengths[-1]} is above the context of {context} tokens; lower it or raise "
            f"--context"
        )
    if lengths[0] <= arguments.max_tokens:
        raise ConfigError(
            f"a length of {lengths[0]} tokens has no room for the needle, its question and an "
            f"answer of {arguments.max_tokens}; use longer ones or a lower --max-tokens"
        )
    return Asked(lengths, arguments.depths, plan.max_sequences, arguments.max_tokens, "")


def default_lengths(context_tokens: int) -> tuple[int, ...]:
    """Doubled from FIRST_LENGTH, and the whole context."""
    lengths, length = [], FIRST_LENGTH
    while length < context_tokens:
        lengths.append(length)
        length *= 2
    return (*lengths, context_tokens)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the gang as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
