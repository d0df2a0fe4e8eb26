"""`nrank inspect`: what a model directory holds and whether it is whole.

Reads headers only, except for `--write-manifest` and `--verify`, which read every tensor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deploy.flags import add_command, add_model_flag, model_path
from placement.errors import ConfigError
from placement.headers import CheckpointHeaders
from placement.spec import ModelSpec, TensorSpec

GIB = 1 << 30


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "inspect",
        "Tensors, formats and bytes of a model directory; exits 2 when something is missing.",
        "nrank inspect --model /models/my-model --json",
    )
    add_model_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--dump-headers", metavar="FILE", help="write all tensor headers, for nrank plan --headers"
    )
    digests = parser.add_mutually_exclusive_group()
    digests.add_argument(
        "--write-manifest", action="store_true", help="hash all tensors into nrank.manifest.json"
    )
    digests.add_argument(
        "--verify", action="store_true", help="hash all tensors and compare with the manifest"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from placement.headers import read_headers
    from placement.models.matching import TensorMismatchError
    from placement.models.registry import spec_from_headers

    model_dir = model_path(arguments.model)
    headers = read_headers(model_dir)
    if arguments.dump_headers is not None:
        _dump(headers, arguments.dump_headers)
    try:
        spec = spec_from_headers(headers)
    except TensorMismatchError as error:
        if arguments.json:
            print(json.dumps(broken(model_dir, error.missing, error.unknown)))
        raise
    summary = summarise(model_dir, spec, headers)
    if arguments.write_manifest or arguments.verify:
        summary["manifest"] = _digest(headers, arguments.verify)
    print(json.dumps(summary) if arguments.json else describe(summary))
    return 0


def _dump(headers: CheckpointHeaders, path: str) -> None:
    from placement.headers import header_dump

    try:
        Path(path).write_text(json.dumps(header_dump(headers)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--dump-headers {path}: can't be written ({error.strerror})") from error


def _digest(headers: CheckpointHeaders, verify: bool) -> dict[str, Any]:
    """Writes or checks the manifest; says which file and how many tensors."""
    from placement.manifest import MANIFEST_FILE, verify_manifest, write_manifest

    path = str(Path(headers.model_dir) / MANIFEST_FILE)
    progress = Progress("verified" if verify else "hashed")
    if verify:
        count = verify_manifest(headers, progress)
    else:
        path, count = write_manifest(headers, progress), len(headers.tensors)
    return {"path": path, "tensors": count, "verified": verify}


class Progress:
    """Shows whole percents in one line of a terminal; writes nothing anywhere else."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._shown = -1
        self._on = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        percent = done * 100 // total if total else 100
        if not self._on or percent == self._shown:
            return
        self._shown = percent
        end = "\n" if done == total else ""
        told = f"{self._verb} {done / GIB:.2f} of {total / GIB:.2f} GiB ({percent} %)"
        print(f"\r{told}", end=end, file=sys.stderr, flush=True)


def broken(model_dir: str, missing: Iterable[str], unknown: dict[str, str]) -> dict[str, Any]:
    """What is wrong with a directory whose tensors aren't those of its config."""
    return {
        "path": model_dir,
        "missing_tensors": list(missing),
        "unknown_tensors": [{"name": name, "nearest": near} for name, near in unknown.items()],
    }


def summarise(model_dir: str, spec: ModelSpec, headers: CheckpointHeaders) -> dict[str, Any]:
    """Figures of a directory that the adapter accepted: nothing is unknown or missing in it."""
    components: Counter[str] = Counter()
    for tensor in every_tensor(spec):
        components[tensor.component.value] += piece_bytes(tensor, headers)
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
        "formats": _dtypes(headers),
        "weight_formats": _weight_formats(spec, headers),
        "bytes_per_component": dict(components),
        "draft_tensors": len(spec.draft_tensors),
        "runnable": spec.runnable,
        "obstacles": list(spec.obstacles),
        "remarks": list(spec.remarks),
        "ignored_tensors": list(spec.ignored_tensors),
        "ignored_bytes": sum(headers.tensors[name].nbytes for name in spec.ignored_tensors),
        "superseded_tensors": list(headers.superseded),
        "unknown_tensors": [],
        "missing_tensors": [],
    }


def every_tensor(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    return (
        *spec.tensors, *spec.draft_tensors, *spec.scale_tensors, *spec.draft_scale_tensors,
    )  # fmt: skip


def piece_bytes(tensor: TensorSpec, headers: CheckpointHeaders) -> int:
    return sum(headers.tensors[name].nbytes for name in {piece.name for piece in tensor.pieces})


def _dtypes(headers: CheckpointHeaders) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for header in headers.tensors.values():
        entry = found.setdefault(header.dtype, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += header.nbytes
    return found


def _weight_formats(spec: ModelSpec, headers: CheckpointHeaders) -> dict[str, dict[str, int]]:
    """Low-bit formats with their matrices on disk and the bytes of the codes, without scales."""
    found: dict[str, dict[str, int]] = {}
    for tensor in (*spec.tensors, *spec.draft_tensors):
        if tensor.format is not None:
            entry = found.setdefault(tensor.format.name, {"tensors": 0, "bytes": 0})
            entry["tensors"] += len(tensor.pieces)
            entry["bytes"] += piece_bytes(tensor, headers)
    return found


def describe(summary: dict[str, Any]) -> str:
    kinds = Counter(summary["layers"])
    lines = [
        f"{summary['model']}: {summary['family']}, {summary['tensors']} tensors, "
        f"{summary['total_bytes']:,} bytes",
        f"layers: {len(summary['layers'])} ({', '.join(f'{n} {k}' for k, n in kinds.items())})",
        f"hidden {summary['hidden']}, vocabulary {summary['vocab']}, "
        f"{summary['experts']} experts a layer, context {summary['max_context_tokens']}",
        *(
            f"dtype {k}: {v['tensors']} tensors, {v['bytes']:,} bytes"
            for k, v in summary["formats"].items()
        ),
        *(
            f"format {k}: {v['tensors']} matrices, {v['bytes']:,} bytes of codes"
            for k, v in summary["weight_formats"].items()
        ),
        *(f"{name}: {size:,} bytes" for name, size in summary["bytes_per_component"].items()),
        f"draft head: {summary['draft_tensors']} tensors",
        f"ignored: {len(summary['ignored_tensors'])} ({summary['ignored_bytes']:,} bytes), "
        f"superseded: {len(summary['superseded_tensors'])}, unknown: 0, missing: 0",
        *(f"remark: {text}" for text in summary["remarks"]),
        *(f"can't be run: {text}" for text in summary["obstacles"]),
        *_manifest_line(summary.get("manifest")),
    ]
    return "\n".join(lines)


def _manifest_line(manifest: dict[str, Any] | None) -> list[str]:
    if manifest is None:
        return []
    verb = "equal to" if manifest["verified"] else "hashed into"
    return [f"manifest: {manifest['tensors']} tensors {verb} {manifest['path']}"]
