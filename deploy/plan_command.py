"""`nrank plan`: what a gang would hold on each rank, from headers alone. Needs no torch, no ray."""

from __future__ import annotations

import argparse
import json

from deploy.flags import add_command, add_engine_flags, add_model_flag, engine_config
from placement.errors import ConfigError
from placement.headers import CheckpointHeaders
from placement.spec import ModelSpec


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "plan",
        "Memory ledger, ownership and estimated step time of each rank; reads headers only.",
        "nrank plan --model /models/my-model --ranks 4 --chip 310p3 --context 131072",
    )
    add_model_flag(parser)
    parser.add_argument("--model-config", metavar="FILE", help="config.json of a model elsewhere")
    parser.add_argument("--headers", metavar="FILE", help="its tensor headers as one JSON object")
    parser.add_argument("--chip", metavar="NAME", help="chip profile (default: the device's)")
    add_engine_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from placement.explain import explain
    from placement.plan import make_plan, require_fits

    config = engine_config(arguments)
    spec, headers = _load(arguments, config.model_dir)
    plan = make_plan(config, spec, headers)
    print(json.dumps(plan.to_json()) if arguments.json else explain(plan))
    require_fits(plan)
    return 0


def _load(
    arguments: argparse.Namespace, model_dir: str
) -> tuple[ModelSpec, CheckpointHeaders | None]:
    from placement.models.registry import load_model_spec, spec_from_config

    if arguments.model_config is None:
        if arguments.headers is not None:
            raise ConfigError("--headers goes with --model-config; a model directory has its own")
        return load_model_spec(model_dir)
    if arguments.model is not None:
        raise ConfigError("--model and --model-config name two models; give one of them")
    if arguments.headers is None:
        return spec_from_config(arguments.model_config), None
    from deploy.header_file import spec_from_header_file

    return spec_from_header_file(arguments.model_config, arguments.headers)
