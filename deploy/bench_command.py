"""`nrank bench`: decode and prefill rates of the engine beside transformers on the same weights.

All systems are up at once and take turns, so what disturbs the machine disturbs all of them. No
rate is printed unless every run of every system made the same greedy ids.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from deploy.bench_workloads import FULL, QUICK, Row, Run, Sizes, System, Workload, make_workloads
from deploy.flags import add_command, add_model_flag, bounded, model_path
from deploy.prompts import ModelLimits
from placement.config import EngineConfig
from placement.errors import ConfigError, NrankError, RankError
from rank_worker.messages import EngineRequest

if TYPE_CHECKING:
    from rank_worker.launch import Engine

DTYPE = "float32"  # the only type in which two implementations make the same ids
PEERS = ("transformers", "none")
THREADS_PER_RANK = 1


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "bench",
        "Decode and prefill rates on this CPU, beside transformers on the same checkpoint.",
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
    from deploy.bench_report import Origin, Settings, print_table, to_json

    origin = Origin.here()
    model_dir = model_path(arguments.model)
    workloads = load_workloads(model_dir, QUICK if arguments.quick else FULL)
    configs = plan_engines(model_dir, arguments.ranks)
    with ExitStack() as stack:
        systems = list(start_systems(stack, configs, arguments.peer))
        rows = measure(systems, workloads, arguments.repeats)
    settings = Settings(model_dir, DTYPE, THREADS_PER_RANK, arguments.repeats)
    print_table(origin, settings, rows, PEERS[0])
    if arguments.json:
        print(json.dumps(to_json(origin, settings, rows)))
    return 0


def load_workloads(model_dir: str, sizes: Sizes) -> list[Workload]:
    """The model's workloads; ConfigError when its context is too short for them."""
    limits = ModelLimits.read(EngineConfig(model_dir, dtype=DTYPE))
    if sizes.context_tokens > limits.context_tokens:
        raise ConfigError(
            f"bench needs a context of {sizes.context_tokens} tokens, {model_dir} has "
            f"{limits.context_tokens}; try --quick"
        )
    return make_workloads(limits.vocab, limits.end_token_ids, sizes)


def plan_engines(model_dir: str, ranks: Sequence[int]) -> list[EngineConfig]:
    """One config a rank count, all planned before any starts; an error when one can't run."""
    from placement.prepare import prepare

    configs = [EngineConfig(model_dir, ranks=count, dtype=DTYPE) for count in ranks]
    for config in configs:
        prepare(config)
    return configs


def start_systems(stack: ExitStack, configs: Sequence[EngineConfig], peer: str) -> Iterator[System]:
    """The peer, then an engine a config, all left running until `stack` closes."""
    if peer != "none":
        from deploy.bench_peer import TransformersPeer

        yield TransformersPeer(configs[0].model_dir)
    from rank_worker.launch import launch_engine

    for config in configs:
        yield EngineSystem(stack.enter_context(launch_engine(config)), config.ranks)


@dataclass(frozen=True)
class EngineSystem:
    """The engine as a System: requests go in together, times are those of its token batches."""

    engine: Engine
    ranks: int
    name: str = "nrank"

    def run(self, workload: Workload) -> Run:
        results = self.engine.generate(
            [
                EngineRequest(f"{workload.id}-{i}", ids, workload.max_tokens, ignore_eos=True)
                for i, ids in enumerate(workload.prompts)
            ]
        )
        for result in results:
            if result.error:
                raise RankError(f"{workload.id}: {result.error}")
        first_s = min(result.ttft_s for result in results)
        return Run(
            tuple(result.token_ids for result in results),
            max(result.ttft_s for result in results),
            max(result.last_token_s for result in results) - first_s,
        )


def measure(systems: Sequence[System], workloads: Sequence[Workload], repeats: int) -> list[Row]:
    """One row for each workload and system, systems in turns; NrankError when ids differ."""
    rows: list[Row] = []
    for workload in _with_progress(workloads):
        expected = [system.run(workload).token_ids for system in systems]  # a warm-up as well
        for system, token_ids in zip(systems, expected, strict=True):
            require_same_ids(workload, system, token_ids, systems[0], expected[0])
        runs: list[list[Run]] = [[] for _ in systems]
        for _ in range(repeats):
            for system, made in zip(systems, runs, strict=True):
                made.append(system.run(workload))
                require_same_ids(workload, system, made[-1].token_ids, systems[0], expected[0])
        rows += [Row.of(workload, system, made) for system, made in zip(systems, runs, strict=True)]
    return rows


def require_same_ids(
    workload: Workload,
    system: System,
    found: tuple[tuple[int, ...], ...],
    other: System,
    expected: tuple[tuple[int, ...], ...],
) -> None:
    """NrankError naming the first request and position at which `found` is not `expected`."""
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if len(theirs) != workload.max_tokens:
            raise NrankError(
                f"{workload.id}: {other.name} made {len(theirs)} tokens for request {index} where "
                f"{workload.max_tokens} were asked for; no rate is printed"
            )
        if mine != theirs:
            same = (a == b for a, b in zip(mine, theirs, strict=False))
            at = sum(1 for _ in takewhile(bool, same))
            raise NrankError(
                f"{workload.id}: {system.name} with ranks={system.ranks} made other ids than "
                f"{other.name} with ranks={other.ranks} from token {at} of request {index} on "
                f"({list(mine[at : at + 3])}, not {list(theirs[at : at + 3])}); no rate is "
                f"printed, as the work was not the same: run make test to find the fault"
            )


def _with_progress(workloads: Sequence[Workload]) -> Iterable[Workload]:
    """A bar on a terminal's stderr, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import track

    disable, console = not sys.stderr.isatty(), Console(stderr=True)
    return track(workloads, "workloads", console=console, transient=True, disable=disable)
