"""`nrank plan`: what a gang would hold on each rank, from headers alone. Needs no torch, no ray."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from deploy.defaults import drafts_of
from deploy.flags import add_command, add_engine_flags, add_model_flag, bounded, engine_config
from placement.errors import ConfigError
from placement.headers import CheckpointHeaders
from placement.spec import ModelSpec

if TYPE_CHECKING:
    from placement.capacity import Capacity, Change, Question, WhatIf
    from placement.ownership import OwnershipRequest
    from placement.plan import Plan, PlanOptions


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "plan",
        "Memory ledger, ownership, capacity and estimated step time; reads headers only.",
        "nrank plan --model /models/my-model --ranks 4 --chip 310p3 --what-if 6",
    )
    add_model_flag(parser)
    parser.add_argument("--model-config", metavar="FILE", help="config.json of a model elsewhere")
    parser.add_argument("--headers", metavar="FILE", help="its tensor headers as one JSON object")
    parser.add_argument(
        "--format", metavar="F",
        help="of routed experts: w4g128, w2:33-44, ...; all else is as the headers say, and plain "
        "with --model-config alone",
    )  # fmt: skip
    _add_chip_flags(parser)
    add_engine_flags(parser)
    _add_ownership_flags(parser)
    parser.add_argument("--what-if", type=bounded(1), metavar="N", help="what N ranks would give")
    parser.add_argument("--explain", action="store_true", help="say why each row is what it is")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=run)


def _add_chip_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chip", metavar="NAME", help="chip profile; implies its device")
    parser.add_argument(
        "--usable-bytes", type=bounded(1), metavar="B", help="memory of each chip (default: its)"
    )
    parser.add_argument(
        "--ecc", choices=("off", "on"), default="off",
        help="error correction of the chips; on needs --usable-bytes",
    )  # fmt: skip
    parser.add_argument(
        "--ngram-table", choices=("device", "host", "mmap"), default="device",
        help="where the n-gram table lies (default device: its rows dealt over the ranks)",
    )  # fmt: skip


def _add_ownership_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ownership", metavar="FILE", help="use exactly this expert ownership")
    parser.add_argument(
        "--current", metavar="FILE", help="ownership in use (plan --json): move as little as can be"
    )
    parser.add_argument(
        "--counts", metavar="FILE|URL",
        help="routing counts to balance by: what `nrank generate --json` printed, or the base URL "
        "of a running server, such as http://127.0.0.1:8000",
    )  # fmt: skip
    parser.add_argument(
        "--replicas-bytes", type=bounded(0), default=0, metavar="B",
        help="of each rank for copies of hot experts; needs --counts",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    from placement.capacity import capacity, remedies, what_if
    from placement.plan import require_fits

    question = _question(arguments)
    plan = question.plan()
    found = capacity(question)
    other = what_if(question, arguments.what_if) if arguments.what_if else None
    ways = [] if plan.fits else remedies(question)
    if arguments.json:
        print(json.dumps(_as_json(plan, found, ways, other)))
    else:
        print("\n".join(_as_text(question, plan, found, other, arguments.explain)))
    require_fits(plan, [_text(way) for way in ways])
    return 0


def _question(arguments: argparse.Namespace) -> Question:
    from placement.capacity import Question

    arguments.device = _device(arguments)
    dtype_given = arguments.dtype is not None
    config = engine_config(arguments)
    load = _loader(arguments, config.model_dir)
    spec, headers = load(arguments.format)
    if arguments.model_config is not None and config.device == "cuda" and not dtype_given:
        config = replace(config, dtype=spec.checkpoint_dtype)
    if arguments.mtp is None:
        config = replace(config, mtp=drafts_of(spec))
    config = replace(config, usable_bytes=arguments.usable_bytes or 0)
    options = _options(arguments, spec)
    return Question(config, spec, headers, options, lambda form: load(form)[0])


def _device(arguments: argparse.Namespace) -> str | None:
    """The device of the chip. ConfigError where the flag names another one."""
    from placement.topology import find_profile

    if arguments.chip is None:
        return str(arguments.device) if arguments.device else None
    device = find_profile("", arguments.chip).device
    if arguments.device not in (None, device):
        raise ConfigError(
            f"--chip {arguments.chip} is a chip of --device {device}, but --device "
            f"{arguments.device} was given: leave out one of them"
        )
    return device


def _options(arguments: argparse.Namespace, spec: ModelSpec) -> PlanOptions:
    from placement.ledger import LedgerOptions, TablePlace
    from placement.plan import PlanOptions

    return PlanOptions(
        ledger=LedgerOptions(TablePlace(arguments.ngram_table)),
        ownership=_request(arguments, spec),
        ecc=arguments.ecc == "on",
    )


def _request(arguments: argparse.Namespace, spec: ModelSpec) -> OwnershipRequest:
    from placement.ownership import OwnershipRequest
    from placement.ownership_files import read_ownership

    exact = read_ownership(arguments.ownership) if arguments.ownership else None
    current = read_ownership(arguments.current) if arguments.current else None
    return OwnershipRequest(
        exact=exact.layers if exact else None,
        replicas=exact.replicas if exact else (),
        current=current.layers if current else None,
        counts=_counts(arguments.counts, spec) if arguments.counts else (),
        replicas_bytes=arguments.replicas_bytes,
    )


def _counts(source: str, spec: ModelSpec) -> tuple[tuple[float, ...], ...]:
    from deploy.server_counts import fetch_counts
    from deploy.server_json import is_url
    from placement.ownership_files import checked_counts, read_counts

    if not is_url(source):
        return read_counts(source, spec)
    return checked_counts(*fetch_counts(source), spec)


def _loader(
    arguments: argparse.Namespace, model_dir: str
) -> Callable[[str | None], tuple[ModelSpec, CheckpointHeaders | None]]:
    """What reads the model in the format of `--format F`, each format once."""
    from placement.formats import parse_format
    from placement.headers import read_header_dump
    from placement.models.quantised import with_format
    from placement.models.registry import load_model_spec, spec_from_config

    if arguments.model_config is not None:
        if arguments.model is not None:
            raise ConfigError("--model and --model-config name two models; give one of them")
        dump = read_header_dump(arguments.headers) if arguments.headers is not None else None
        return cache(lambda form: (spec_from_config(arguments.model_config, dump, form), dump))
    if arguments.headers is not None:
        raise ConfigError("--headers goes with --model-config; a model directory has its own")
    spec, headers = load_model_spec(model_dir)
    return cache(lambda form: (with_format(spec, parse_format(form)) if form else spec, headers))


def _text(way: Sequence[Change]) -> str:
    return " and ".join(change.text for change in way)


def _as_json(
    plan: Plan, found: Capacity, ways: Sequence[Sequence[Change]], other: WhatIf | None
) -> dict[str, Any]:
    told = plan.to_json()
    told["capacity"] = _capacity_json(found)
    told["remedies"] = [
        [{"kind": change.kind, "text": change.text} for change in way] for way in ways
    ]
    told["what_if"] = other and {
        "plan_id": other.plan.plan_id,
        "fits": other.plan.fits,
        "world_size": other.plan.world_size,
        "planned_bytes": [rank.planned_bytes for rank in other.plan.ranks],
        "rows": [dict(rank.rows) for rank in other.plan.ranks],
        "full_sequences": other.plan.full_sequences,
        "capacity": _capacity_json(other.capacity),
        "decode_step_s": other.plan.estimate.decode_step_s,
        "moved_experts": other.moved_experts,
    }
    return told


def _capacity_json(found: Capacity) -> dict[str, int]:
    return {
        "sequences_of_context": found.sequences,
        "context_of_sequences": found.context_tokens,
    }


def _as_text(
    question: Question, plan: Plan, found: Capacity, other: WhatIf | None, explained: bool
) -> list[str]:
    from placement.explain import explain
    from placement.reasons import reasons

    lines = [explain(plan), _capacity_text(plan, found)]
    if other is not None:
        step = other.plan.estimate.decode_step_s * 1e3
        verdict = "fits" if other.plan.fits else "does not fit"
        lines.append(
            f"with {other.plan.world_size} ranks: {verdict}, "
            f"{_capacity_text(other.plan, other.capacity)}, a step of at least {step:.3g} ms, "
            f"{other.moved_experts} experts moved"
        )
    if explained:
        lines += ["", *reasons(question, plan)]
    return lines


def _capacity_text(plan: Plan, found: Capacity) -> str:
    return (
        f"capacity: {found.sequences} sequences of {plan.context.configured_tokens} tokens, or "
        f"{plan.max_sequences} sequences of {found.context_tokens} tokens"
    )
