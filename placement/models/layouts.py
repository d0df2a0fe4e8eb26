"""How a matrix of a checkpoint is stored, decided from names, dtypes and shapes in its headers.

Knows the naming conventions of public low-bit formats, no model. What config.json claims has no
part in it: configs of converted checkpoints are often those of the original.

| stored as | tensors beside the codes |
|---|---|
| `X.weight` F8_E4M3 [N, K], DeepSeek FP8 | `X.weight_scale_inv` a block of 128 x 128 |
| `X.weight` F8_E4M3 [N, K], compressed-tensors | `X.weight_scale` a block, a row or one |
| `X.weight` F8_E4M3 [N, K], MXFP8 | `X.weight_scale` U8 [N, K/32] |
| `X.weight` I8 [N, K], per channel | `X.weight_scale` [N, 1], `_offset` or `_zero_point` |
| `X.weight` I8 [N, K/2], signed nibbles | `X.weight_scale` [N, K/g], `X.weight_offset` I8 |
| `X.weight` U8 [N, K/2], ModelOpt NVFP4 | `X.weight_scale` F8 [N, K/16], `weight_scale_2` |
| `X.weight_packed` I32 [N, K/8], compressed-tensors | `X.weight_scale` [N, K/g], `weight_shape` |
| `X.weight_packed` U8 [N, K/2], NVFP4 or MXFP4 | `X.weight_scale`, `weight_global_scale` |
| `X_codes` U8 [N, K*b/8], two's complement | `X_scale` F32 [N/32, K/32] |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from placement import formats
from placement.errors import CheckpointError
from placement.formats import WeightFormat
from placement.headers import DTYPE_BITS, CheckpointHeaders, TensorHeader

FLOAT_DTYPES = ("BF16", "F16", "F32")
FP8 = "F8_E4M3"
PACKED_WORD_BITS = 32
STATED_DTYPES = ("I64", "I32")  # of a `weight_shape`
GROUP_UNIT = 16  # columns that kernels take at once
BLOCKED: Mapping[int, WeightFormat] = {2: formats.W2, 4: formats.W4B32}


@dataclass(frozen=True, slots=True)
class ScaleTensor:
    """A tensor beside the codes.

    `part` is scale, zero, global_scale (multiplies) or global_divisor (divides).
    """

    part: str
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the codes of one matrix are, what they mean, and what belongs to them.

    `side` names tensors that come with the format and that no weight-only product needs.
    """

    format: WeightFormat
    name: str
    shape: tuple[int, ...]
    packed: int = 1
    scales: tuple[ScaleTensor, ...] = ()
    side: tuple[str, ...] = ()


class LayoutFinder:
    """Finds the layout of one matrix after the other in the same headers."""

    def __init__(self, headers: CheckpointHeaders) -> None:
        self._headers = headers
        self._tensors = headers.tensors

    def find(self, name: str, shape: tuple[int, ...]) -> Layout | None:
        """Layout of the [rows, columns] matrix that a plain checkpoint calls `name`.

        None where it is plain or isn't there at all. Raises CheckpointError for codes without
        their scales and for a layout that isn't known.
        """
        header = self._tensors.get(name)
        if header is not None and (header.dtype in FLOAT_DTYPES or header.dtype == "I64"):
            return None
        base = name.removesuffix(".weight")
        if header is not None:
            return _Matrix(self._headers, name, base, header, shape).of_weight()
        packed, codes = base + ".weight_packed", base + "_codes"
        if packed in self._tensors:
            return _Matrix(self._headers, packed, base, self._tensors[packed], shape).of_packed()
        if codes in self._tensors:
            return _Matrix(self._headers, codes, base, self._tensors[codes], shape).of_codes()
        return None


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The codes of one matrix: their name, header, and the shape of the matrix that they mean."""

    headers: CheckpointHeaders
    name: str
    base: str  # that the names of its scales begin with
    header: TensorHeader
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[-2]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    def beside(self, suffix: str) -> TensorHeader | None:
        return self.headers.tensors.get(self.base + suffix)

    def of_weight(self) -> Layout:
        if len(self.shape) != 2:
            raise self.unknown("low-bit data is supported for matrices only")
        if self.header.dtype == FP8:
            return self._fp8()
        if self.header.dtype == "I8":
            return self._int8()
        if self.header.dtype == "U8":
            return self._nvfp4("_scale_2", "input_scale")
        raise self.unknown(f"no known layout; plain weights are {', '.join(FLOAT_DTYPES)}")

    def of_packed(self) -> Layout:
        if self.header.dtype == "U8":
            self._need_pairs()
            if self.beside(".weight_global_scale") is None:
                found = self.beside(".weight_scale")
                # NVFP4's scales are FP8, those of MXFP4 exponents.
                if found is not None and found.dtype == FP8:
                    raise self.unscaled(".weight_global_scale")
                scale = self._scale(".weight_scale", ("U8", "F8_E8M0"), formats.MXFP4)
                return Layout(formats.MXFP4, self.name, self.header.shape, 2, (scale,))
            return self._nvfp4("_global_scale", "input_global_scale")
        if self.header.dtype != "I32":
            raise self.unknown("packed codes are I32 or U8")
        return self._packed_integers()

    def of_codes(self) -> Layout:
        bits = self.header.shape[-1] * 8 // self.columns if self.header.shape else 0
        if bits not in BLOCKED or self.header.dtype != "U8":
            raise self.unknown(f"codes of {list(self.shape)} values are U8, 2 or 4 bits each")
        self._need(self.header, (self.rows, self.columns * bits // 8))
        scale = self._scale("_scale", ("F32",), BLOCKED[bits])
        return Layout(BLOCKED[bits], self.name, self.header.shape, 8 // bits, (scale,))

    def _fp8(self) -> Layout:
        self._need(self.header, (self.rows, self.columns))
        if self.beside(".weight_scale_inv") is not None:
            return self._plain_scaled(".weight_scale_inv", formats.FP8_BLOCK128)
        header = self.beside(".weight_scale")
        if header is None:
            raise self.unscaled(".weight_scale_inv", ".weight_scale")
        for candidate in (formats.FP8_BLOCK128, formats.FP8_CHANNEL):
            if header.shape == candidate.scale_counts(self.shape):
                return self._plain_scaled(".weight_scale", candidate)
        if header.dtype in ("U8", "F8_E8M0"):
            scale = self._scale(".weight_scale", ("U8", "F8_E8M0"), formats.MXFP8)
            return Layout(formats.MXFP8, self.name, self.header.shape, 1, (scale,))
        if header.shape in ((), (1,)):
            return whole_scale(self.name, self.header.shape, self.base + ".weight_scale", header)
        raise self.wrong_shape(self.base + ".weight_scale", header, "a block, a row, or one number")

    def _int8(self) -> Layout:
        scale = self.beside(".weight_scale")
        if scale is None:
            raise self.unscaled(".weight_scale")
        zeros = (".weight_offset", ".weight_zero_point")
        zero = next((suffix for suffix in zeros if self.beside(suffix) is not None), None)
        if self.header.shape == (self.rows, self.columns):
            return self._plain_scaled(".weight_scale", formats.W8 if zero else formats.W8_SYM, zero)
        self._need_pairs()
        return self._grouped(".weight_scale", zero, ("I8",), 2)

    def _packed_integers(self) -> Layout:
        words = ceil(self.columns * 4 / PACKED_WORD_BITS)
        self._need(self.header, (self.rows, words))
        if self.columns % 8:
            raise self.unknown(f"{self.columns} columns of 4 bits don't fill whole I32 words")
        zero = ".weight_zero_point" if self.beside(".weight_zero_point") else None
        found = self._grouped(".weight_scale", zero, ("I32",), 8)
        self._part("shape", ".weight_shape", STATED_DTYPES, (2,))  # a rank reads what it says
        if self.beside(".weight_g_idx") is not None:
            raise CheckpointError(
                f"{self.header.file}: {self.base}.weight_g_idx orders the columns of "
                f"{self.name} by activation, which isn't supported: quantise without actorder"
            )
        return replace(found, side=(stated_shape_name(self.name),))

    def _grouped(
        self, suffix: str, zero: str | None, zero_dtypes: tuple[str, ...], packed: int
    ) -> Layout:
        """4-bit integers with a scale a group of columns; the group follows from the shape."""
        header = self.beside(suffix)
        if header is None:
            raise self.unscaled(suffix)
        groups = header.shape[-1] if len(header.shape) == 2 else 0
        if not groups or header.shape[0] != self.rows or self.columns % groups:
            raise self.wrong_shape(self.base + suffix, header, f"[{self.rows}, groups of columns]")
        group = self.columns // groups
        if group % GROUP_UNIT and group != self.columns:
            raise CheckpointError(
                f"{header.file}: {self.base}{suffix} is {list(header.shape)}, so {self.columns} "
                f"columns have groups of {group}; a multiple of {GROUP_UNIT} is supported"
            )
        name = f"w4g{group}" + ("_asym" if zero else "")
        known = formats.FORMATS.get(name) or WeightFormat(
            name, 4, group=group, scale_bytes=2, zero_bytes=1 if zero else 0
        )
        scale = self._scale(suffix, FLOAT_DTYPES, known)
        parts = [scale]
        if zero is not None:
            # compressed-tensors packs zero points eight rows to a word.
            rows = self.rows if zero_dtypes == ("I8",) else ceil(self.rows / 8)
            parts.append(self._part("zero", zero, zero_dtypes, (rows, groups)))
        sized = formats.with_scale_bytes(known, DTYPE_BITS[header.dtype] // 8)
        return Layout(sized, self.name, self.header.shape, packed, tuple(parts))

    def _nvfp4(self, whole_suffix: str, activation: str) -> Layout:
        if self.beside(".weight_scale") is None:
            raise self.unscaled(".weight_scale")
        self._need_pairs()
        scale = self._scale(".weight_scale", (FP8,), formats.NVFP4)
        one = self.beside(".weight" + whole_suffix)
        if one is None:
            raise self.unscaled(".weight" + whole_suffix)
        if one.dtype != "F32" or one.shape not in ((), (1,)):
            raise self.wrong_shape(self.base + ".weight" + whole_suffix, one, "one F32 number")
        part = "global_divisor" if whole_suffix == "_global_scale" else "global_scale"
        parts = (scale, ScaleTensor(part, f"{self.base}.weight{whole_suffix}", one.shape))
        side = f"{self.base}.{activation}"
        given = (side,) if side in self.headers.tensors else ()
        return Layout(formats.NVFP4, self.name, self.header.shape, 2, parts, given)

    def _plain_scaled(self, suffix: str, base: WeightFormat, zero: str | None = None) -> Layout:
        header = self.beside(suffix)
        assert header is not None
        parts = [self._scale(suffix, FLOAT_DTYPES, base)]
        width = DTYPE_BITS[header.dtype] // 8
        sized = formats.with_scale_bytes(base, width)
        if zero is not None:
            parts.append(self._part("zero", zero, (*FLOAT_DTYPES, "I8"), parts[0].shape))
            found = self.headers.tensors[self.base + zero]
            sized = replace(sized, zero_bytes=DTYPE_BITS[found.dtype] // 8)
        return Layout(sized, self.name, self.header.shape, 1, tuple(parts))

    def _scale(self, suffix: str, dtypes: tuple[str, ...], of: WeightFormat) -> ScaleTensor:
        return self._part("scale", suffix, dtypes, of.scale_counts(self.shape))

    def _part(
        self, part: str, suffix: str, dtypes: tuple[str, ...], shape: tuple[int, ...]
    ) -> ScaleTensor:
        header = self.beside(suffix)
        if header is None:
            raise self.unscaled(suffix)
        if header.shape != shape or header.dtype not in dtypes:
            raise self.wrong_shape(self.base + suffix, header, f"{list(shape)} {'|'.join(dtypes)}")
        return ScaleTensor(part, self.base + suffix, shape)

    def _need(self, header: TensorHeader, shape: tuple[int, ...]) -> None:
        if header.shape != shape:
            raise CheckpointError(
                f"{header.file}: {self.name} has shape {list(header.shape)} ({header.dtype}), "
                f"config.json says {list(self.shape)}, which is {list(shape)} stored"
            )

    def _need_pairs(self) -> None:
        """Two codes a byte."""
        if self.columns % 2:
            raise self.unknown(f"{self.columns} columns of 4 bits don't fill whole bytes")
        self._need(self.header, (self.rows, self.columns // 2))

    def unknown(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.header.file}: {self.name} has dtype {self.header.dtype} and shape "
            f"{list(self.header.shape)}: {reason}"
        )

    def unscaled(self, *suffixes: str) -> CheckpointError:
        wanted = " or ".join(self.base + suffix for suffix in suffixes)
        return CheckpointError(
            f"{self.header.file}: {self.name} has dtype {self.header.dtype}, but {wanted} is "
            f"missing; without it only {', '.join(FLOAT_DTYPES)} are weights"
        )

    def wrong_shape(self, name: str, header: TensorHeader, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{header.file}: {name} is {header.dtype} {list(header.shape)}, but {self.name} "
            f"({self.header.dtype} {list(self.header.shape)}) needs {wanted}"
        )


def stated_shape_name(codes: str) -> str:
    """The tensor in which compressed-tensors says what shape the matrix of `weight_packed` has."""
    return codes.removesuffix("_packed") + "_shape"


def whole_scale(name: str, shape: tuple[int, ...], scale_name: str, scale: TensorHeader) -> Layout:
    """FP8 codes under one scale for the whole tensor."""
    if scale.shape not in ((), (1,)) or scale.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{scale.file}: {scale_name} is {scale.dtype} {list(scale.shape)}, but {name} ({FP8}) "
            f"needs one number in {', '.join(FLOAT_DTYPES)}"
        )
    sized = replace(formats.FP8_TENSOR, tensor_bytes=DTYPE_BITS[scale.dtype] // 8)
    return Layout(sized, name, shape, 1, (ScaleTensor("scale", scale_name, scale.shape),))
