"""Gives tensor specs the formats that their checkpoint, or the user, stores them in.

Three sources, one result: headers decide; without them the FP8 section of a config.json; without
both the format that a user names. Knows no model: what is an expert is read off a spec.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from placement import formats
from placement.errors import CheckpointError, ConfigError
from placement.formats import ALL_LAYERS, FormatRule, WeightFormat
from placement.headers import CheckpointHeaders
from placement.models.layouts import FP8, Layout, LayoutFinder, ScaleTensor, whole_scale
from placement.spec import (
    Axis,
    Component,
    DTypeRule,
    ModelSpec,
    Piece,
    Segment,
    Split,
    TensorSpec,
)

# Last parts of the roles of matrices that a packed product is made for.
PROJECTIONS = frozenset((
    "qkv", "z", "b", "a", "out", "q", "k", "v", "o", "index_qk", "router", "shared_gate",
    "shared_gate_proj", "shared_up_proj", "shared_down", "head", "fc_embedding", "fc_hidden",
))  # fmt: skip
UNUSED_FORMATS = ("mxfp8", "fp8_tensor")  # of matrices
FFN_AXES = (Axis.SHARED_FFN, Axis.DENSE_FFN)
FP8_SCALE = "weight_scale_inv"


@dataclass
class Formatted:
    """Specs with formats, the specs of their scales, and names that come with a format."""

    tensors: list[TensorSpec] = field(default_factory=list)
    scales: list[TensorSpec] = field(default_factory=list)
    side: list[str] = field(default_factory=list)


def formats_on_disk(tensors: Iterable[TensorSpec], headers: CheckpointHeaders) -> Formatted:
    """Formats as the headers tell. CheckpointError for missing scales and mixed matrices."""
    finder = LayoutFinder(headers)
    found = Formatted()
    for tensor in tensors:
        layouts = _layouts(tensor, finder, headers)
        if layouts is None:
            found.tensors.append(tensor)
        else:
            _attach(tensor, layouts, found)
    return found


def runs_packed(tensor: TensorSpec) -> bool:
    """True where the engine computes with a tensor in the format that it has, if any."""
    form = tensor.format
    if form is None or form.is_plain:
        return True
    if tensor.component is Component.NGRAM_TABLE or tensor.role.endswith("ngram.table"):
        return form.name == "fp8_tensor"
    is_projection = tensor.role.rpartition(".")[2] in PROJECTIONS
    return form.name not in UNUSED_FORMATS and (tensor.expert_layer >= 0 or is_projection)


def check_cuts(
    tensors: Iterable[TensorSpec],
    owned: Callable[[TensorSpec], Iterable[tuple[int, int]]],
    rank: int,
) -> None:
    """ConfigError where a rank's part of a tensor, by `owned` ranges, begins or ends in a block.

    Experts that are owned whole are never cut.
    """
    for tensor in tensors:
        dim, form = tensor.split.dim - len(tensor.shape), tensor.format
        if form is None or form.is_plain or dim < -2 or not tensor.split.segments:
            continue
        step = form.block_rows if dim == -2 else form.group
        step = max(step, tensor.packed) if dim == -1 else step
        size = tensor.shape[dim]
        for start, stop in owned(tensor):
            cut = next((at for at in (start, stop) if step and at % step and at != size), None)
            if cut is not None:
                raise ConfigError(
                    f"rank {rank} would own {('rows', 'columns')[dim + 2]} {start}..{stop - 1} of "
                    f"{size} of {tensor.role}, stored as {form.name}: {cut} isn't a multiple of "
                    f"its blocks of {step}; use fewer ranks, or a format with smaller blocks"
                )


def _layouts(
    tensor: TensorSpec, finder: LayoutFinder, headers: CheckpointHeaders
) -> list[Layout] | None:
    """A layout a piece; None for a plain tensor (or one that is missing, which is told later)."""
    if tensor.dtype is DTypeRule.INT64:
        return None
    if tensor.component is Component.NGRAM_TABLE:
        table = _table_layouts(tensor, headers)
        if table is not None:
            return table
    layouts = [finder.find(piece.name, piece.shape) for piece in tensor.pieces]
    present = [layout for layout in layouts if layout is not None]
    if not present:
        return None
    for piece, layout in zip(tensor.pieces, layouts, strict=True):
        if layout is None and piece.name not in headers.tensors:
            raise CheckpointError(
                f"{headers.model_dir}: 1 missing tensors ({piece.name}), although other parts of "
                f"{tensor.role} are stored as {present[0].format.name}"
            )
        if layout is None or layout.format != present[0].format:
            one, other = _told_apart(layout.format if layout else None, present[0].format)
            name = layout.name if layout else piece.name
            raise CheckpointError(
                f"{headers.tensors[name].file}: {name} is {one}, but {present[0].name} is {other}; "
                f"both are parts of {tensor.role} and need one format"
            )
    return present


def _told_apart(one: WeightFormat | None, other: WeightFormat) -> tuple[str, str]:
    """Names of two formats, with the widths of scales and zero points where these alone differ."""
    if one is None or one.name != other.name:
        return one.name if one else "plain", other.name
    first, second = (
        f"{each.name} with scales of {each.scale_bytes} bytes"
        + (f" and zero points of {each.zero_bytes}" if each.zero_bytes else "")
        for each in (one, other)
    )
    return first, second


def _table_layouts(tensor: TensorSpec, headers: CheckpointHeaders) -> list[Layout] | None:
    """Table shards in FP8 share one scale, which is named after the table."""
    first = headers.tensors.get(tensor.pieces[0].name)
    if first is None or first.dtype != FP8:
        return None
    base = re.sub(r"(\.shard_\d+)?\.weight$", "", tensor.pieces[0].name)
    scale = headers.tensors.get(base + ".weight_scale")
    if scale is None:
        raise CheckpointError(
            f"{first.file}: {tensor.pieces[0].name} has dtype {FP8}, but {base}.weight_scale is "
            "missing"
        )
    found = []
    for piece in tensor.pieces:
        header = headers.tensors[piece.name]
        if header.dtype != FP8 or header.shape != piece.shape:
            raise CheckpointError(
                f"{header.file}: {piece.name} is {header.dtype} {list(header.shape)}, the other "
                f"shards are {FP8} and config.json says {list(piece.shape)}"
            )
        found.append(whole_scale(piece.name, piece.shape, base + ".weight_scale", scale))
    return found


def _attach(tensor: TensorSpec, layouts: Sequence[Layout], found: Formatted) -> None:
    """The spec with its codes' names, and a spec for each kind of scale."""
    first = layouts[0]
    pieces = tuple(
        Piece(layout.name, layout.shape, piece.origin)
        for piece, layout in zip(tensor.pieces, layouts, strict=True)
    )
    formatted = replace(tensor, pieces=pieces, format=first.format, packed=first.packed)
    found.tensors.append(formatted)
    for index, part in enumerate(first.scales):
        parts = [layout.scales[index] for layout in layouts]
        found.scales.append(_scale_spec(tensor, first.format, part.part, parts))
    for layout in layouts:
        found.side += layout.side


def _scale_spec(
    tensor: TensorSpec, form: WeightFormat, part: str, parts: Sequence[ScaleTensor]
) -> TensorSpec:
    """Scales of all pieces as one tensor that is split like the codes where blocks allow it."""
    component = Component.MTP if tensor.component is Component.MTP else Component.SCALES
    role = f"{tensor.role}.{part}"
    if len({scale.name for scale in parts}) == 1 and len(parts[0].shape) < 2:
        one = Piece(parts[0].name, parts[0].shape, (0,))
        return TensorSpec(role, (1,), Split(), component, (one,), DTypeRule.STORED)
    down, across = parts[0].shape[-2:] if len(parts[0].shape) == 2 else (1, 1)
    outer = tensor.shape[:-2]
    shape = (*outer, down * tensor.stacked, across)
    pieces = tuple(
        Piece(scale.name, scale.shape, _scale_origin(piece, down, len(outer)))
        for piece, scale in zip(tensor.pieces, parts, strict=True)
    )
    split = _scale_split(tensor, form, shape)
    return TensorSpec(
        role, shape, split, component, pieces, DTypeRule.STORED, tensor.expert_layer,
        stacked=tensor.stacked,
    )  # fmt: skip


def _scale_origin(piece: Piece, down: int, outer: int) -> tuple[int, ...]:
    return (*piece.origin[:outer], piece.origin[outer] // piece.shape[-2] * down, 0)


def _scale_split(tensor: TensorSpec, form: WeightFormat, shape: tuple[int, ...]) -> Split:
    """The rule of the codes in units of scales; whole where a unit isn't whole blocks."""
    dim = tensor.split.dim
    if dim < len(tensor.shape) - 2 or not tensor.split.segments:
        return tensor.split
    step = form.block_rows if dim == len(tensor.shape) - 2 else form.group
    if not step or any(segment.block % step for segment in tensor.split.segments):
        return Split()
    segments = [replace(one, block=one.block // step) for one in tensor.split.segments]
    if sum(one.block * one.units for one in segments) != shape[dim]:
        return Split()
    return Split(dim, tuple(segments))


def align_inner_widths(tensors: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Feed-forward widths dealt out in whole blocks of scales, the same unit for all of an axis."""
    tensors = list(tensors)
    units = dict.fromkeys(FFN_AXES, 1)
    for tensor in tensors:
        for segment in tensor.split.segments:
            if segment.axis in units and tensor.format is not None:
                form, rows = tensor.format, tensor.split.dim == len(tensor.shape) - 2
                step = form.block_rows if rows else form.group
                units[segment.axis] = max(units[segment.axis], step or 1, tensor.packed)
    return [_realigned(tensor, units) for tensor in tensors]


def _realigned(tensor: TensorSpec, units: Mapping[Axis, int]) -> TensorSpec:
    segments = tuple(
        Segment(one.axis, unit, one.block * one.units // unit)
        if (unit := units.get(one.axis, 1)) > 1 and one.block * one.units % unit == 0
        else one
        for one in tensor.split.segments
    )
    return replace(tensor, split=Split(tensor.split.dim, segments))


def resplit_scales(
    scales: Iterable[TensorSpec], tensors: Iterable[TensorSpec]
) -> tuple[TensorSpec, ...]:
    """Scales with the rules that follow from those of their tensors, once these are aligned."""
    by_role = {tensor.role: tensor for tensor in tensors if tensor.format is not None}
    split = []
    for scale in scales:
        tensor = by_role[scale.role.rsplit(".", 1)[0]]
        assert tensor.format is not None
        if len(scale.shape) == len(tensor.shape):
            scale = replace(scale, split=_scale_split(tensor, tensor.format, scale.shape))
        split.append(scale)
    return tuple(split)


def formats_of_config(
    tensors: Iterable[TensorSpec], quantisation: Mapping[str, Any], config_path: str
) -> Formatted:
    """What a config.json with block-wise FP8 stores: every linear layer that it doesn't exclude.

    CheckpointError for other methods, whose configs don't tell which tensors are quantised.
    """
    method = quantisation.get("quant_method")
    block = quantisation.get("weight_block_size")
    if method != "fp8" or block != [128, 128]:
        raise CheckpointError(
            f"{config_path}: weights are quantised ({method}), which config.json alone doesn't "
            "describe: give --headers (made by nrank inspect --dump-headers), or --format"
        )
    converts = _converter(quantisation.get("modules_to_not_convert") or [], config_path)
    found = Formatted()
    for tensor in tensors:
        if tensor.component is Component.NGRAM_TABLE and converts(tensor.pieces[0].name):
            _attach(tensor, _fp8_table(tensor), found)
        elif _is_linear(tensor) and converts(tensor.pieces[0].name):
            _attach(tensor, [_fp8_layout(piece) for piece in tensor.pieces], found)
        else:
            found.tensors.append(tensor)
    return found


def _is_linear(tensor: TensorSpec) -> bool:
    """Matrices that a linear layer holds: no embedding, no convolution, nothing kept in fp32."""
    return (
        tensor.dtype is DTypeRule.WEIGHT
        and tensor.component not in (Component.EMBEDDING, Component.NGRAM_TABLE)
        and all(len(piece.shape) == 2 and piece.name.endswith(".weight") for piece in tensor.pieces)
    )


def _converter(excluded: Any, config_path: str) -> Callable[[str], bool]:
    """An entry excludes a module by its name, by any run of whole parts of it, or by `re:`."""
    if not isinstance(excluded, list) or not all(isinstance(one, str) for one in excluded):
        raise _bad_exclusion(config_path, f"{excluded!r} is no list of modules' names")
    try:
        patterns = [re.compile(one[3:]) for one in excluded if one.startswith("re:")]
    except re.error as error:
        raise _bad_exclusion(config_path, f"{error.pattern!r} is no expression ({error})") from None
    parts = [f".{one}." for one in excluded if not one.startswith("re:")]

    def converts(name: str) -> bool:
        module = name.removesuffix(".weight")
        dotted = f".{module}."
        return not (any(p.match(module) for p in patterns) or any(p in dotted for p in parts))

    return converts


def _bad_exclusion(config_path: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{config_path}: quantization_config.modules_to_not_convert: {reason}; repair it, or give "
        "--headers"
    )


def _fp8_layout(piece: Piece) -> Layout:
    name = piece.name.removesuffix("weight") + FP8_SCALE
    counts = formats.FP8_BLOCK128.scale_counts(piece.shape)
    scales = (ScaleTensor("scale", name, counts),)
    return Layout(formats.FP8_BLOCK128, piece.name, piece.shape, 1, scales)


def _fp8_table(tensor: TensorSpec) -> list[Layout]:
    base = re.sub(r"(\.shard_\d+)?\.weight$", "", tensor.pieces[0].name)
    scale = (ScaleTensor("scale", base + ".weight_scale", (1,)),)
    return [Layout(formats.FP8_TENSOR, p.name, p.shape, 1, scale) for p in tensor.pieces]


def with_format(spec: ModelSpec, rule: FormatRule) -> ModelSpec:
    """The model with its routed experts in a user's format, whatever it is on disk.

    Draft experts follow the rule too; where no range holds their layer they stay as they are.
    ConfigError for a layer without a format, and for a range beyond the last layer.
    """
    tensors = tuple(_ruled(tensor, rule, False) for tensor in spec.tensors)
    drafts = tuple(_ruled(tensor, rule, True) for tensor in spec.draft_tensors)
    _check_layers(spec, rule)
    kept = {tensor.role for tensor in (*tensors, *drafts) if tensor.expert_layer < 0}
    return replace(
        spec,
        tensors=tensors,
        draft_tensors=drafts,
        scale_tensors=tuple(_scales_of(spec.scale_tensors, kept)),
        draft_scale_tensors=tuple(_scales_of(spec.draft_scale_tensors, kept)),
        obstacles=(*spec.obstacles, f"routed experts are planned as {rule.name}"),
    )


def _check_layers(spec: ModelSpec, rule: FormatRule) -> None:
    count = len(spec.layers) + len(spec.draft_layers)
    for first, last, _ in rule.ranges:
        if (first, last) != ALL_LAYERS and last >= count:
            drafts = f" and {len(spec.draft_layers)} of drafts" if spec.draft_layers else ""
            raise ConfigError(
                f"format {rule.name!r} names layer {last}, but {spec.name} has {len(spec.layers)} "
                f"layers{drafts}: end the range at {count - 1} at most"
            )


def _ruled(tensor: TensorSpec, rule: FormatRule, draft: bool) -> TensorSpec:
    if tensor.expert_layer < 0:
        return tensor
    try:
        form = rule.of_layer(tensor.expert_layer)
    except ConfigError:
        if draft:
            return tensor
        raise
    return replace(tensor, format=form)


def _scales_of(scales: Iterable[TensorSpec], kept: set[str]) -> Iterator[TensorSpec]:
    return (scale for scale in scales if scale.role.rsplit(".", 1)[0] in kept)
