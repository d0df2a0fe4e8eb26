"""`nrank inspect`: what a model directory holds and whether it is whole. Reads headers only."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from deploy.flags import add_command, add_model_flag, model_path
from placement.headers import CheckpointHeaders
from placement.spec import ModelSpec


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "inspect",
        "Tensors, formats and bytes of a model directory; exits 2 when something is missing.",
        "nrank inspect --model /models/my-model --json",
    )
    add_model_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from placement.models.registry import load_model_spec

    model_dir = model_path(arguments.model)
    spec, headers = load_model_spec(model_dir)
    summary = summarise(model_dir, spec, headers)
    print(json.dumps(summary) if arguments.json else describe(summary))
    return 0


def summarise(model_dir: str, spec: ModelSpec, headers: CheckpointHeaders) -> dict[str, Any]:
    """Figures of a directory that the adapter accepted: nothing is unknown or missing in it."""
    components: Counter[str] = Counter()
    for tensor in (*spec.tensors, *spec.draft_tensors):
        for name in {piece.name for piece in tensor.pieces}:
            components[tensor.component.value] += headers.tensors[name].nbytes
    formats: dict[str, dict[str, int]] = {}
    for header in headers.tensors.values():
        entry = formats.setdefault(header.dtype, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += header.nbytes
    return {
        "model": spec.name,
        "path": model_dir,
        "family": spec.family,
        "layers": [layer.mixer_kind.value for layer in spec.layers],
        "hidden": spec.hidden,
        "vocab": spec.vocab,
        "experts": spec.num_experts,
        "max_context_tokens": spec.max_context,
        "end_token_ids": list(spec.eos_token_ids),
        "tensors": len(headers.tensors),
        "total_bytes": sum(header.nbytes for header in headers.tensors.values()),
        "formats": formats,
        "bytes_per_component": dict(components),
        "draft_tensors": len(spec.draft_tensors),
        "ignored_tensors": list(spec.ignored_tensors),
        "unknown_tensors": [],
        "missing_tensors": [],
    }


def describe(summary: dict[str, Any]) -> str:
    kinds = Counter(summary["layers"])
    lines = [
        f"{summary['model']}: {summary['family']}, {summary['tensors']} tensors, "
        f"{summary['total_bytes']:,} bytes",
        f"layers: {len(summary['layers'])} ({', '.join(f'{n} {k}' for k, n in kinds.items())})",
        f"hidden {summary['hidden']}, vocabulary {summary['vocab']}, "
        f"{summary['experts']} experts a layer, context {summary['max_context_tokens']}",
        *(
            f"format {k}: {v['tensors']} tensors, {v['bytes']:,} bytes"
            for k, v in summary["formats"].items()
        ),
        *(f"{name}: {size:,} bytes" for name, size in summary["bytes_per_component"].items()),
        f"draft head: {summary['draft_tensors']} tensors",
        f"ignored: {len(summary['ignored_tensors'])}, unknown: 0, missing: 0",
    ]
    return "\n".join(lines)
