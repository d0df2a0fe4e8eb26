"""`nrank bench`: rates of the engine beside transformers, then what reuse and drafts bring.

All systems are up at once and take turns, so what disturbs the machine disturbs all of them. No
figure is printed unless every run of every system made the same greedy ids.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deploy.bench.workloads import (
    FULL,
    QUICK,
    Sizes,
    StreamWorkload,
    System,
    Workload,
    make_workloads,
    random_prompt,
    usable_ids,
)
from deploy.defaults import default_drafts
from deploy.flags import add_command, add_model_flag, bounded, model_path
from deploy.prompts import ModelLimits
from placement.config import EngineConfig
from placement.errors import ConfigError

if TYPE_CHECKING:
    from deploy.bench.gains import GainWorkloads, Gangs

DTYPE = "float32"  # the only type in which two implementations make the same ids
PEERS = ("transformers", "none")
THREADS_PER_RANK = 1


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "bench",
        "Rates on this CPU beside transformers on the same checkpoint; gains by reuse and drafts.",
        "nrank bench --ranks 1,2 --repeats 5 --json",
    )
    add_model_flag(parser)
    parser.add_argument(
        "--ranks", type=rank_counts, default=(1, 2), metavar="1,2", help="rank counts to measure"
    )
    parser.add_argument("--repeats", type=bounded(1), default=5, metavar="N", help="default 5")
    parser.add_argument(
        "--quick", action="store_true", help="fewer tokens: a check, no measurement"
    )
    parser.add_argument("--peer", choices=PEERS, default=PEERS[0], help="system to compare with")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.set_defaults(run=run)


def rank_counts(text: str) -> tuple[int, ...]:
    """Argument type: different rank counts, separated by commas."""
    counts = tuple(bounded(1)(part) for part in text.split(","))
    if len(set(counts)) < len(counts):
        raise argparse.ArgumentTypeError(f"{text!r} names a rank count twice")
    return counts


def run(arguments: argparse.Namespace) -> int:
    # Read when torch is loaded, here and in the ranks.
    os.environ["OMP_NUM_THREADS"] = str(THREADS_PER_RANK)
    from deploy.bench.gains import measure_gains
    from deploy.bench.measure import measure
    from deploy.bench.report import Origin, Settings, print_report, to_json

    origin = Origin.here()
    model_dir, sizes = model_path(arguments.model), QUICK if arguments.quick else FULL
    limits = ModelLimits.read(EngineConfig(model_dir, dtype=DTYPE))
    workloads = load_workloads(limits, sizes)
    configs = [plan_engines(model_dir, count) for count in arguments.ranks]
    gain_workloads = load_gain_workloads(limits, sizes, configs[0], arguments.repeats)
    with ExitStack() as stack:
        peers = list(start_peer(model_dir, arguments.peer))
        gangs = [start_gangs(stack, config) for config in configs]
        rows = measure([*peers, *(gang.plain for gang in gangs)], workloads, arguments.repeats)
        gains = measure_gains(gangs, gain_workloads, arguments.repeats)
    settings = Settings(
        model_dir, DTYPE, THREADS_PER_RANK, arguments.repeats,
        configs[0].drafting.mtp, configs[0].plain.decode_share,
    )  # fmt: skip
    print_report(origin, settings, rows, gains, PEERS[0])
    if arguments.json:
        print(json.dumps(to_json(origin, settings, rows, gains)))
    return 0


@dataclass(frozen=True)
class Configs:
    """Of one rank count: nothing that drafts or reuses, then one of them each."""

    plain: EngineConfig
    drafting: EngineConfig
    reusing: EngineConfig


def load_workloads(limits: ModelLimits, sizes: Sizes) -> list[Workload]:
    """Those measured beside the peer; ConfigError when the model's context is too short."""
    if sizes.context_tokens > limits.context_tokens:
        raise ConfigError(
            f"bench needs a context of {sizes.context_tokens} tokens, {limits.model_dir} has "
            f"{limits.context_tokens}; try --quick"
        )
    return make_workloads(usable_ids(limits.vocab, limits.end_token_ids), sizes)


def load_gain_workloads(
    limits: ModelLimits, sizes: Sizes, configs: Configs, repeats: int
) -> GainWorkloads:
    """Those of reuse and drafts which this model can run."""
    from deploy.bench.gains import GainWorkloads
    from deploy.bench.texts import draft_workloads

    usable = usable_ids(limits.vocab, limits.end_token_ids)
    drafts, left_out = draft_workloads(limits, usable, sizes)
    if not configs.drafting.mtp:
        drafts, left_out = [], ["drafts: the model has no draft head that can be run"]
    prefixes = [
        Workload(f"prefix-{sizes.prefix}", (random_prompt(usable, index, sizes.prefix),), sizes.new)
        for index in range(1 + repeats)
    ]
    stream = StreamWorkload(
        f"beside-{sizes.beside}",
        random_prompt(usable, 0, sizes.prompt),
        random_prompt(usable, 1, sizes.beside),
        sizes.alone,
        limits.context_tokens - sizes.prompt,
    )
    found = GainWorkloads(drafts, prefixes, [stream], left_out)
    return found.within(limits.context_tokens)


def plan_engines(model_dir: str, ranks: int) -> Configs:
    """All planned before any starts; an error when one can't run."""
    from placement.prepare import prepare

    plain = EngineConfig(model_dir, ranks=ranks, dtype=DTYPE, mtp=0, prefix_cache=False)
    drafting = replace(plain, mtp=default_drafts(model_dir))
    reusing = replace(plain, prefix_cache=True)
    for config in (plain, drafting, reusing):
        prepare(config)
    return Configs(plain, drafting, reusing)


def start_peer(model_dir: str, peer: str) -> Iterator[System]:
    if peer != "none":
        from deploy.bench.peer import TransformersPeer

        yield TransformersPeer(model_dir)


def start_gangs(stack: ExitStack, configs: Configs) -> Gangs:
    """The engines of one rank count, left running until `stack` closes."""
    from deploy.bench.engine_system import EngineSystem
    from deploy.bench.gains import Gangs

    plain, drafting, reusing = configs.plain, configs.drafting, configs.reusing
    return Gangs(
        EngineSystem.start(stack, plain),
        EngineSystem.start(stack, drafting, f"nrank with {drafting.mtp} drafts")
        if drafting.mtp
        else None,
        EngineSystem.start(stack, reusing, "nrank with a prefix cache"),
    )
