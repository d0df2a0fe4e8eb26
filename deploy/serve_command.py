"""`nrank serve`: config file and flags to a running server."""

from __future__ import annotations

import argparse

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


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "serve",
        "Start Ray, Serve and a gang of ranks in the foreground; without a model the embedded one.",
        "nrank serve --model /models/my-model --ranks 4 --device npu --port 8000",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file; flags override it")
    add_model_flag(parser)
    add_engine_flags(parser)
    add_run_flags(parser)
    parser.add_argument("--host", metavar="H", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=bounded(0), metavar="P", help="port (default 8000)")
    parser.add_argument("--model-name", metavar="ID", help="model id in the API")
    parser.add_argument("--ray-address", metavar="A", help="use this Ray instead of a local one")
    parser.add_argument(
        "--evidence", dest="evidence_file", metavar="FILE", help="what nrank certify wrote"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from deploy.config import load_config

    overrides = given(arguments)
    for name in ("host", "port", "model_name", "ray_address", "evidence_file"):
        if getattr(arguments, name) is not None:
            overrides[name] = getattr(arguments, name)
    if arguments.model is not None:
        overrides["model"] = model_path(arguments.model)
    config = load_config(arguments.config, overrides)
    refuse_missing_features(config.engine())
    from deploy.serve import serve_foreground

    return int(serve_foreground(config))
