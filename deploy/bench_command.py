"""`nrank bench`: rates of the engine beside transformers, then what reuse and drafts bring.

All systems are up at once and take turns, so what disturbs the machine disturbs all of them. No
figure is printed unless every run of every system made the same greedy ids. Beside that: two
configurations of the engine, two result files, operators alone.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deploy.bench.workloads import (
    FULL,
    QUICK,
    Sizes,
    StreamWorkload,
    System,
    Workload,
    fingerprints,
    make_workloads,
    random_prompt,
    usable_ids,
)
from deploy.defaults import default_drafts
from deploy.flags import add_command, add_model_flag, bounded, model_path
from deploy.prompts import ModelLimits
from placement.config import EngineConfig
from placement.errors import ConfigError
from placement.whole_file import require_place

if TYPE_CHECKING:
    from deploy.bench.gains import GainWorkloads, Gangs

DTYPE = "float32"  # the only type in which two implementations make the same ids
PEERS = ("transformers", "none")
THREADS_PER_RANK = 1


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "bench",
        "Rates on this CPU beside transformers on the same checkpoint; gains by reuse and drafts; "
        "or two configurations, two result files, or operators alone.",
        "nrank bench --against mtp=0,prefix_cache=off --ranks 2 --out against.json",
    )
    add_model_flag(parser)
    parser.add_argument(
        "--ranks", type=rank_counts, metavar="1,2",
        help="rank counts to measure (default 1,2; with --against 1)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=bounded(1), default=5, metavar="N", help="default 5")
    parser.add_argument(
        "--quick", action="store_true", help="fewer tokens: a check, no measurement"
    )
    parser.add_argument("--peer", choices=PEERS, default=PEERS[0], help="system to compare with")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--against", metavar="FIELD=VALUE,...",
        help="measure the engine as the server runs it (A) side by side with this change (B)",
    )  # fmt: skip
    modes.add_argument(
        "--compare", nargs=2, metavar=("OLD", "NEW"),
        help="compare two result files; exit code 1 when a figure is slower beyond both spreads",
    )  # fmt: skip
    modes.add_argument(
        "--ops", action="store_true", help="time operators alone, at the shapes of a large model"
    )
    parser.add_argument(
        "--base", metavar="FIELD=VALUE,...", help="with --against: what A and B have in common"
    )
    parser.add_argument("--out", metavar="FILE", help="write the line of JSON to a file")
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
    if arguments.base is not None and arguments.against is None:
        raise ConfigError("--base is A of --against; add --against FIELD=VALUE")
    if arguments.out is not None:
        require_place("--out", arguments.out)
    if arguments.compare:
        outcome = run_compare(*arguments.compare)
    elif arguments.ops:
        outcome = run_ops(arguments)
    elif arguments.against is not None:
        outcome = run_against(arguments)
    else:
        outcome = run_speed(arguments)
    line = json.dumps(outcome.result)
    if arguments.out is not None:  # first: whoever reads the tables may close the pipe
        from deploy.bench.results import write_result

        write_result(arguments.out, line)
    outcome.show()
    if arguments.json:
        print(line)
    return outcome.code


@dataclass(frozen=True)
class Outcome:
    """What was measured, as JSON, and how to print it for people."""

    result: dict[str, Any]
    show: Callable[[], None]
    code: int = 0


def run_compare(old: str, new: str) -> Outcome:
    from deploy.bench.comparison import Verdict, compare_files, comparison_json, print_comparison

    found = compare_files(old, new)
    code = 1 if found.count(Verdict.SLOWER) else 0
    return Outcome(comparison_json(found), lambda: print_comparison(found), code)


def run_ops(arguments: argparse.Namespace) -> Outcome:
    from deploy.bench.op_cases import CASES
    from deploy.bench.op_packed_cases import PACKED_CASES
    from deploy.bench.op_report import MeasuredOps, ops_json, print_ops
    from deploy.bench.op_times import measure_ops, without_inputs
    from deploy.bench.origin import Ending, Origin

    origin, cases = Origin.here(), (*CASES, *PACKED_CASES)
    rows = measure_ops(cases, arguments.repeats, arguments.quick)
    measured = MeasuredOps(
        origin, Ending.now(), THREADS_PER_RANK, arguments.repeats, rows, without_inputs(cases)
    )
    code = 0 if all(row.is_equal for row in rows) else 1
    return Outcome(ops_json(measured), lambda: print_ops(measured), code)


def run_against(arguments: argparse.Namespace) -> Outcome:
    from deploy.bench.against import Pair, measure_pairs
    from deploy.bench.against_report import MeasuredPairs, pairs_json, print_pairs
    from deploy.bench.engine_system import EngineSystem
    from deploy.bench.heat import chip_heat
    from deploy.bench.origin import Ending, Origin
    from deploy.bench.sides import make_rounds, make_sides
    from deploy.certify.binding import checkpoint_hash

    ranks, *more = arguments.ranks or (1,)
    if more:
        raise ConfigError(f"--against takes one rank count, not {1 + len(more)}; give --ranks 1")
    origin, model_dir = Origin.here(), model_path(arguments.model)
    sides = make_sides(model_dir, ranks, arguments.base or "", arguments.against)
    sizes, repeats = QUICK if arguments.quick else FULL, arguments.repeats
    limits = sides.limits()
    rounds, left_out = make_rounds(limits, sizes, repeats)
    if not rounds:
        raise ConfigError(
            f"no workload fits the context of {limits.context_tokens} tokens that both sides have; "
            f"raise context_tokens{'' if arguments.quick else ' or try --quick'}"
        )
    with ExitStack() as stack:
        a, b = (EngineSystem.start(stack, c, n) for n, c in (("A", sides.a), ("B", sides.b)))
        hot = sides.b if sides.a.device == "cpu" else sides.a
        celsius = stack.enter_context(chip_heat(hot.device, max(a.ranks, b.ranks)))
        pair = Pair(a, b, sides.has_same_ids)
        pairs = measure_pairs(pair, rounds, left_out, celsius)
    measured = MeasuredPairs(
        origin, Ending.now(row.max_celsius for row in pairs.rows), sides,
        checkpoint_hash(model_dir), THREADS_PER_RANK, repeats,
        fingerprints([one.workloads[0] for one in rounds]), pairs,
    )  # fmt: skip
    return Outcome(pairs_json(measured), lambda: print_pairs(measured), 0 if pairs.rows else 1)


def run_speed(arguments: argparse.Namespace) -> Outcome:
    from deploy.bench.gains import measure_gains
    from deploy.bench.heat import chip_heat
    from deploy.bench.measure import measure
    from deploy.bench.origin import Ending, Origin
    from deploy.bench.report import Measured, Settings, print_report, to_json
    from deploy.certify.binding import checkpoint_hash

    origin, ranks = Origin.here(), arguments.ranks or (1, 2)
    model_dir, sizes = model_path(arguments.model), QUICK if arguments.quick else FULL
    limits = ModelLimits.read(EngineConfig(model_dir, dtype=DTYPE))
    workloads = load_workloads(limits, sizes)
    configs = [plan_engines(model_dir, count) for count in ranks]
    plain = configs[0].plain
    gain_workloads = load_gain_workloads(limits, sizes, configs[0], arguments.repeats)
    with ExitStack() as stack:
        peers = list(start_peer(model_dir, arguments.peer))
        gangs = [start_gangs(stack, config) for config in configs]
        celsius = stack.enter_context(chip_heat(plain.device, max(ranks)))
        systems = [*peers, *(gang.plain for gang in gangs)]
        rows = measure(systems, workloads, arguments.repeats, celsius)
        gains = measure_gains(gangs, gain_workloads, arguments.repeats)
        ending = Ending.now([*(row.max_celsius for row in rows), celsius()])
    settings = Settings(
        model_dir, checkpoint_hash(model_dir), DTYPE, THREADS_PER_RANK, arguments.repeats,
        configs[0].drafting.mtp, plain.decode_share,
    )  # fmt: skip
    prompts = fingerprints([*workloads, *gain_workloads.all()])
    measured = Measured(origin, ending, settings, prompts, rows, gains)
    return Outcome(to_json(measured), lambda: print_report(measured, PEERS[0]))


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
