"""How low-bit weights are stored: bits, groups, scales, and the bytes these add up to.

Pure arithmetic on shapes. Owns no tensor name and no decoding; says how many bytes a matrix takes,
on disk and packed in memory alike. Sources: the compressed-tensors, ModelOpt and OCP MX format
descriptions, and DeepSeek's block-wise FP8 layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, prod

from placement.errors import ConfigError

Shape = tuple[int, ...]


class Code(StrEnum):
    """What the bits of one value mean, before its scale."""

    INTEGER = "integer"  # two's complement in memory, whatever a writer stores
    E4M3 = "e4m3"  # 8-bit float of OCP, no infinities
    E2M1 = "e2m1"  # 4-bit float: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign


LARGEST_VALUE = 65504.0  # no weight of a model comes near it; float16 ends there
LARGEST_FLOAT_CODES = {Code.E4M3: 448.0, Code.E2M1: 6.0}


@dataclass(frozen=True)
class WeightFormat:
    """One way to store matrices [..., rows, columns], packed along the columns.

    A scale covers `block_rows` rows and `group` columns, where 0 stands for all of them. A zero
    point, where `zero_bytes` isn't 0, stands beside each scale. `tensor_bytes` are the scales that
    a matrix has once.
    """

    name: str
    bits: int
    group: int = 0
    block_rows: int = 1
    scale_bytes: int = 0
    zero_bytes: int = 0
    tensor_bytes: int = 0
    code: Code = Code.INTEGER

    @property
    def is_plain(self) -> bool:
        """True where the bytes are the values: no scale of any kind."""
        return not (self.scale_bytes or self.zero_bytes or self.tensor_bytes)

    @property
    def largest_scale(self) -> float:
        """The product of a value's scales can't be larger: codes reach beyond LARGEST_VALUE."""
        return LARGEST_VALUE / LARGEST_FLOAT_CODES.get(self.code, float(1 << self.bits - 1))

    def payload_bytes(self, shape: Shape) -> int:
        """Bytes of the codes; rows begin at whole bytes."""
        *outer, columns = shape or (1,)
        return prod(outer) * ceil(columns * self.bits / 8)

    def scale_counts(self, shape: Shape, stacked: int = 1) -> tuple[int, int]:
        """Scales along rows and columns of one matrix, which is `stacked` stored ones in a row."""
        rows, columns = (1, *shape)[-2:] if shape else (1, 1)
        part = rows // stacked
        down = ceil(part / self.block_rows) if self.block_rows else min(part, 1)
        across = ceil(columns / self.group) if self.group else min(columns, 1)
        return down * stacked, across

    def scale_bytes_of(self, shape: Shape, stacked: int = 1) -> int:
        """Bytes of scales, zero points and scales of a whole matrix.

        `stacked`: stored matrices that lie above each other in each matrix of `shape` (gate and up
        in one); each begins its own blocks.
        """
        matrices = prod(shape[:-2])
        if not prod(shape):
            return 0
        down, across = self.scale_counts(shape, stacked)
        each = down * across * (self.scale_bytes + self.zero_bytes)
        return matrices * (each + stacked * self.tensor_bytes)


F32 = WeightFormat("f32", 32)
BF16 = WeightFormat("bf16", 16)
F16 = WeightFormat("f16", 16)
FP8_BLOCK128 = WeightFormat(
    "fp8_block128", 8, group=128, block_rows=128, scale_bytes=4, code=Code.E4M3
)
FP8_CHANNEL = WeightFormat("fp8_channel", 8, scale_bytes=4, code=Code.E4M3)
FP8_TENSOR = WeightFormat(
    "fp8_tensor", 8, tensor_bytes=4, code=Code.E4M3
)  # an n-gram table under one scale
W8 = WeightFormat("w8", 8, scale_bytes=4, zero_bytes=4)  # per channel, F32 scale and offset
W8_SYM = WeightFormat("w8_sym", 8, scale_bytes=4)
W4G128 = WeightFormat("w4g128", 4, group=128, scale_bytes=2)
W4G128_ASYM = WeightFormat("w4g128_asym", 4, group=128, scale_bytes=2, zero_bytes=1)
W4G32 = WeightFormat("w4g32", 4, group=32, scale_bytes=2)
W4G32_ASYM = WeightFormat("w4g32_asym", 4, group=32, scale_bytes=2, zero_bytes=1)
W4B32 = WeightFormat("w4b32", 4, group=32, block_rows=32, scale_bytes=4)
W2 = WeightFormat("w2", 2, group=32, block_rows=32, scale_bytes=4)
NVFP4 = WeightFormat("nvfp4", 4, group=16, scale_bytes=1, tensor_bytes=4, code=Code.E2M1)
MXFP4 = WeightFormat("mxfp4", 4, group=32, scale_bytes=1, code=Code.E2M1)
MXFP8 = WeightFormat("mxfp8", 8, group=32, scale_bytes=1, code=Code.E4M3)

# Names on the command line. A format applies to the routed experts, unless a checkpoint says more.
FORMATS: Mapping[str, WeightFormat] = {
    one.name: one
    for one in (
        F32, BF16, F16, FP8_BLOCK128, FP8_CHANNEL, W8, W8_SYM, W4G128, W4G128_ASYM, W4G32,
        W4G32_ASYM, W4B32, W2, NVFP4, MXFP4, MXFP8,
    )
} | {"fp8": FP8_BLOCK128}  # fmt: skip
PLAIN_BY_DTYPE: Mapping[str, WeightFormat] = {"F32": F32, "BF16": BF16, "F16": F16}


@dataclass(frozen=True)
class FormatRule:
    """Format by layer: the first range, inclusive, that holds the layer."""

    ranges: tuple[tuple[int, int, WeightFormat], ...]

    @property
    def name(self) -> str:
        return ",".join(
            one.name if (first, last) == ALL_LAYERS else f"{one.name}:{first}-{last}"
            for first, last, one in self.ranges
        )

    def of_layer(self, layer: int) -> WeightFormat:
        """ConfigError for a layer that no range holds."""
        for first, last, one in self.ranges:
            if first <= layer <= last:
                return one
        raise ConfigError(
            f"format {self.name!r} says nothing about layer {layer}: add a range that holds it"
        )


ALL_LAYERS = (0, 1 << 30)


def parse_format(text: str) -> FormatRule:
    """`w4g128` for all layers, or ranges of layers such as `w4b32:3-32,w2:33-44`."""
    return FormatRule(tuple(_parse_range(part, text) for part in text.split(",")))


def _parse_range(part: str, text: str) -> tuple[int, int, WeightFormat]:
    name, colon, span = part.strip().partition(":")
    first, dash, last = span.partition("-")
    if name not in FORMATS:
        raise ConfigError(f"format {text!r}: {name!r} is unknown, known: {', '.join(FORMATS)}")
    if not colon:
        return (*ALL_LAYERS, FORMATS[name])
    last = last if dash else first
    is_range = span.isascii() and first.isdecimal() and last.isdecimal()
    if not is_range or int(first) > int(last):
        raise ConfigError(f"format {text!r}: {span!r} is no range of layers such as 3-32")
    return int(first), int(last), FORMATS[name]


def with_scale_bytes(base: WeightFormat, scale_bytes: int) -> WeightFormat:
    """The same format with scales as wide as a checkpoint stores them."""
    return base if base.scale_bytes == scale_bytes else replace(base, scale_bytes=scale_bytes)
