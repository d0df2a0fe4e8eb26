"""Which matrices of a model are packed, into which format, and who stores it so.

Routers, gates of shared experts, hyper-connections, norms, convolutions, gate and state parameters,
embeddings and n-gram tables are never packed: they are small, or read a row at a time, and their
errors reach every token of every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ops.lowbit.pack import Writer
from placement.errors import ConfigError
from placement.formats import ALL_LAYERS, FORMATS, Code, FormatRule, WeightFormat, parse_format
from placement.models.quantised import PROJECTIONS, UNUSED_FORMATS
from placement.spec import DTypeRule, ModelSpec, TensorSpec

# Projections that stay as they are, by the last part of their role: routing and state parameters.
KEPT = frozenset(("router", "shared_gate", "a", "b"))
WORD_COLUMNS = 8  # 4-bit codes of an I32 word
SOURCES = ("fp8_block128", "fp8_channel")  # formats that are taken apart again; others lost more
PLAIN = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclass(frozen=True)
class Recipe:
    """`experts` by layer; `dense` for projections, shared experts and the head, None: as it is."""

    experts: FormatRule
    dense: WeightFormat | None = None

    @classmethod
    def parse(cls, experts: str, dense: str | None) -> Recipe:
        """ConfigError for a name that is no format, or none that can be written."""
        found = cls(parse_format(experts), None if dense is None else _one_format(dense))
        for form in (*(one for _, _, one in found.experts.ranges), found.dense):
            if form is not None and form.name in UNUSED_FORMATS:
                usable = ", ".join(name for name in FORMATS if name not in UNUSED_FORMATS)
                raise ConfigError(f"{form.name} can't be run packed; use one of {usable}")
        return found

    def format_of(self, tensor: TensorSpec, is_draft: bool) -> WeightFormat | None:
        """None where the tensor stays as it is. ConfigError for a layer that no range holds.

        Drafts follow the rule where it holds their layer, which is numbered behind the others.
        """
        if tensor.expert_layer >= 0:
            try:
                return self.experts.of_layer(tensor.expert_layer)
            except ConfigError:
                if is_draft:
                    return None
                raise
        return self.dense if is_packable(tensor) else None

    def check(self, spec: ModelSpec) -> None:
        """ConfigError in one line for what this model can't be stored as."""
        self._check_layers(spec)
        for tensor, is_draft in every_tensor(spec):
            form = self.format_of(tensor, is_draft)
            if form is not None:
                _check_tensor(spec, tensor, form)

    def _check_layers(self, spec: ModelSpec) -> None:
        count = len(spec.layers) + len(spec.draft_layers)
        for first, last, one in self.experts.ranges:
            if (first, last) != ALL_LAYERS and last >= count:
                drafts = f" and {len(spec.draft_layers)} of drafts" if spec.draft_layers else ""
                raise ConfigError(
                    f"--format {one.name}:{first}-{last} names layer {last}, but {spec.name} has "
                    f"{len(spec.layers)} layers{drafts}: end the range at {count - 1} at most"
                )


def every_tensor(spec: ModelSpec) -> list[tuple[TensorSpec, bool]]:
    """All tensors but scales, and whether they are of the draft head."""
    trunk, drafts = ((one, False) for one in spec.tensors), ((t, True) for t in spec.draft_tensors)
    return [*trunk, *drafts]


def is_packable(tensor: TensorSpec) -> bool:
    """True for dense matrices that the engine multiplies packed."""
    last = tensor.role.rpartition(".")[2]
    return last in PROJECTIONS - KEPT and tensor.dtype is DTypeRule.WEIGHT


def writer_of(form: WeightFormat) -> Writer:
    """Who stores a format so that the loader, and other engines where they can, read it."""
    if form.block_rows == 32:
        return Writer.CODES
    is_block = form.code is Code.E4M3 and form.block_rows == 128
    return Writer.BLOCKS if is_block else Writer.COMPRESSED


def _one_format(name: str) -> WeightFormat:
    ranges = parse_format(name).ranges
    if len(ranges) > 1 or ranges[0][:2] != ALL_LAYERS:
        raise ConfigError(f"--dense {name!r} names layers; it takes one format for all of them")
    return ranges[0][2]


def _check_tensor(spec: ModelSpec, tensor: TensorSpec, form: WeightFormat) -> None:
    stored, columns = tensor.format, tensor.shape[-1]
    if stored is not None and not stored.is_plain and stored.name not in SOURCES:
        raise ConfigError(
            f"{tensor.role} of {spec.name} is stored as {stored.name} already; quantise from "
            f"floats or {', '.join(SOURCES)}"
        )
    if form.is_plain:
        if PLAIN[form.name] != spec.checkpoint_dtype:
            raise ConfigError(
                f"--format {form.name}: floats of {spec.name} are {spec.checkpoint_dtype} and stay "
                "so; name that type for layers that aren't packed"
            )
    elif form.bits < 8 and form.group and columns % form.group:
        raise ConfigError(
            f"{form.name}: {tensor.role} has {columns} columns, which aren't whole groups of "
            f"{form.group}; use a format with a smaller group"
        )
    elif form.bits == 4 and writer_of(form) is Writer.COMPRESSED and columns % WORD_COLUMNS:
        raise ConfigError(
            f"{form.name}: {tensor.role} has {columns} columns, a word holds {WORD_COLUMNS}; use w8"
        )
