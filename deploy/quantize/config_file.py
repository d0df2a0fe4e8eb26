"""The config.json of a quantised model: what other engines read about its formats.

nrank itself decides by the tensors. Packed integers and FP4 are described as compressed-tensors
does, FP8 in blocks as its first models did; formats that no other engine reads have a name of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deploy.quantize.recipe import writer_of
from deploy.quantize.shards import Copy, Job, Pack
from ops.lowbit.pack import Writer
from placement.formats import Code, WeightFormat
from placement.models.assembly import without_quantisation

COMPRESSED_FORMATS = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}


def quantised_config(config: Mapping[str, Any], jobs: Sequence[Job]) -> dict[str, Any]:
    """`config` with the section that `jobs` make; without one where nothing is packed."""
    packed = [job for job in jobs if isinstance(job, Pack) and not job.form.is_plain]
    plain = without_quantisation(config)
    return {**plain, "quantization_config": _section(packed, jobs)} if packed else plain


def _section(packed: Sequence[Pack], jobs: Sequence[Job]) -> dict[str, Any]:
    kept = [_module(job.name) for job in jobs if isinstance(job, Copy) and _is_linear(job)]
    by_format: dict[WeightFormat, list[str]] = {}
    for job in packed:
        by_format.setdefault(job.form, []).append(_module(job.matrix.name))
    writers = {writer_of(form) for form in by_format}
    if writers == {Writer.BLOCKS}:
        return {
            "quant_method": "fp8", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128], "modules_to_not_convert": sorted(kept),
        }  # fmt: skip
    every = {name for names in by_format.values() for name in names} | set(kept)
    groups = {
        f"group_{index}": _group(form, patterns(names, every))
        for index, (form, names) in enumerate(by_format.items())
    }
    formats = {str(group["format"]) for group in groups.values()}
    is_ours = writers != {Writer.COMPRESSED}
    return {
        "quant_method": "nrank" if is_ours else "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": patterns(kept, every),
        "kv_cache_scheme": None,
    }


def _group(form: WeightFormat, targets: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": form.bits,
        "type": "int" if form.code is Code.INTEGER else "float",
        "symmetric": not form.zero_bytes,
        "dynamic": False,
        "strategy": "group" if form.group else "channel",
        "group_size": form.group or None,
        "observer": "minmax",
    }
    if form.block_rows > 1:
        weights |= {"strategy": "block", "block_structure": [form.block_rows, form.group]}
    if form.tensor_bytes:
        weights["strategy"] = "tensor_group"
    return {
        "format": _format_name(form), "targets": targets, "weights": weights,
        "input_activations": None, "output_activations": None,
    }  # fmt: skip


def _format_name(form: WeightFormat) -> str:
    if writer_of(form) is not Writer.COMPRESSED:
        return form.name
    if form.bits == 8:
        return "int-quantized" if form.code is Code.INTEGER else "float-quantized"
    return COMPRESSED_FORMATS.get(form.name, "pack-quantized")


def patterns(names: Iterable[str], every: set[str]) -> list[str]:
    """Expressions that match these modules and none of the others: with any number in the place
    of each where that is so, else with any expert's, else their names.
    """
    mine = set(names)
    others = every - mine
    for generalise in (_any_number, _any_last_number):
        found = sorted({generalise(name) for name in mine})
        compiled = [re.compile(one[len("re:") :]) for one in found]
        if not any(one.match(other) for other in others for one in compiled):
            return found
    return sorted(mine)


def _any_number(name: str) -> str:
    return "re:" + re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name)) + "$"


def _any_last_number(name: str) -> str:
    return "re:" + re.sub(r"\\\.\d+(\\\.\D*)$", r"\\.\\d+\1", re.escape(name)) + "$"


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _is_linear(job: Copy) -> bool:
    return job.name.endswith(".weight") and len(job.header.shape) == 2
