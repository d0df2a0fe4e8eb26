"""Low-bit weights of a rank out of what was read for them: checked, and in one order of bits.

Codes and scales arrive as the file has them, in their final memory. A scale that is missing or
misshapen was refused with the headers; here their values are looked at, and the tensor on disk
that holds a bad one is named. Knows no file format beyond `placement.models.layouts`' parts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ops.lowbit.convert import codes_of_words, has_nan_codes, without_fp8, zeros_of_bank
from ops.lowbit.packed import Packed
from placement.config import RankShare
from placement.errors import CheckpointError
from placement.formats import LARGEST_FLOAT_CODES, Code
from placement.partition import Range, local_index_ranges, local_shape
from placement.spec import TensorSpec

PARTS = ("scale", "zero", "global_scale", "global_divisor")


class PackedReader:
    """Makes `Packed` weights of one rank. `scales` are the specs of what lies beside codes.

    FP8 matrices become 8-bit integers: no product here takes FP8, and most chips have none.
    """

    def __init__(self, share: RankShare, scales: Iterable[TensorSpec]) -> None:
        self.share, self.scales = share, {spec.role: spec for spec in scales}

    def assemble(self, tensor: TensorSpec, codes: Tensor, parts: dict[str, Tensor]) -> Packed:
        """One weight of codes and of what `parts` (by their names in PARTS) were read.

        Raises CheckpointError for values that can't be scales or zero points.
        """
        form = tensor.format
        assert form is not None
        for part, read in parts.items():
            self._check(tensor, part, read)
        if "global_divisor" in parts:
            parts["global_scale"] = parts.pop("global_divisor").reciprocal()
        shape = local_shape(tensor, self.share)
        codes = self._codes(codes, shape)
        zero = self._zero(tensor, parts.get("zero"))
        whole = parts["global_scale"].float() if "global_scale" in parts else None
        if whole is not None and whole.dim() > 1:  # of a bank; a dense matrix has its one number
            whole = whole.flatten(-2)
        scale = self._own_blocks(tensor, "scale", parts["scale"])
        if scale.dtype is torch.uint8:  # exponents of MX formats
            scale = scale.view(torch.float8_e8m0fnu)
        packed = Packed(form, shape, codes, scale, zero, whole, tensor.stacked)
        if form.scale_bytes:
            return self._without_fp8(tensor, packed)
        if has_nan_codes(codes):  # of a table under one scale, which is looked up as it is
            raise _no_number(tensor)
        return packed

    @staticmethod
    def _codes(read: Tensor, shape: tuple[int, ...]) -> Tensor:
        if read.dtype is torch.int32:
            return codes_of_words(read)
        is_bytes = read.dtype is torch.int8 and read.shape[-1] != shape[-1]
        return read.view(torch.uint8) if is_bytes else read

    def _zero(self, tensor: TensorSpec, read: Tensor | None) -> Tensor | None:
        if read is None:
            return None
        if read.dtype is torch.int32:
            spec = self.scales[f"{tensor.role}.zero"]
            rows = local_shape(tensor, self.share)[-2]
            if not spec.split.segments:  # words of eight rows: all of them were read
                rows = tensor.shape[-2]
            read = zeros_of_bank(read, rows, tensor.stacked)
        return self._own_blocks(tensor, "zero", read)

    def _own_blocks(self, tensor: TensorSpec, part: str, read: Tensor) -> Tensor:
        """The rank's blocks, where the blocks of all ranks had to be read."""
        spec, split = self.scales[f"{tensor.role}.{part}"], tensor.split
        dim, form = split.dim - len(tensor.shape), tensor.format
        assert form is not None
        step = form.block_rows if dim == -2 else form.group
        if spec.split.segments or not split.segments or dim < -2 or not step or read.dim() < 2:
            return read
        spans = [blocks(span, step) for span in local_index_ranges(tensor, self.share)]
        owned = [read.narrow(dim, first, stop - first) for first, stop in spans]
        return torch.cat(owned, dim) if owned else read.narrow(dim, 0, 0)

    def _without_fp8(self, tensor: TensorSpec, packed: Packed) -> Packed:
        try:
            return without_fp8(packed)
        except ValueError as error:
            raise _no_number(tensor) from error

    def _check(self, tensor: TensorSpec, part: str, read: Tensor) -> None:
        if not read.numel() or read.dtype is torch.int32:
            return
        form, is_exponent = tensor.format, read.dtype is torch.uint8
        assert form is not None
        values = (read.view(torch.float8_e8m0fnu) if is_exponent else read).float()
        if part == "zero":
            limit = float(1 << form.bits)
            wrong, wanted = ~(values.abs() <= limit), f"a finite number up to {limit:.0f}"
        elif part == "scale":
            limit = form.largest_scale
            wrong = ~((values > 0) & (values <= limit))
            wanted = f"above 0 and at most {limit:g}"
        else:  # the scales below it are E4M3, and writers use all of their range
            limit = form.largest_scale / LARGEST_FLOAT_CODES[Code.E4M3]
            divides = part == "global_divisor"
            wrong = ~((values > 0) & torch.isfinite(values))
            wrong |= values < 1 / limit if divides else values > limit
            wanted = f"at least {1 / limit:g}" if divides else f"above 0 and at most {limit:g}"
        if wrong.any():
            index = tuple(int(i) for i in wrong.nonzero()[0])
            name, at = self._disk_place(f"{tensor.role}.{part}", index)
            raise CheckpointError(
                f"{name}: {int(wrong.sum())} of its values can't be a {part.replace('_', ' ')}, "
                f"the first is {values[index]:g} at {at}; allowed is {wanted}: "
                "quantise the model again or load the file again"
            )

    def _disk_place(self, role: str, index: tuple[int, ...]) -> tuple[str, list[int]]:
        """The tensor on disk that has the value at a local index of `role`, and where in it."""
        spec = self.scales[role]
        at = list(index)
        for start, stop in local_index_ranges(spec, self.share):
            if at[spec.split.dim] < stop - start:
                at[spec.split.dim] += start
                break
            at[spec.split.dim] -= stop - start
        for piece in spec.pieces:
            size = (*[1] * (len(at) - len(piece.shape)), *piece.shape)
            spans = zip(at, piece.origin, size, strict=False)
            if all(origin <= i < origin + extent for i, origin, extent in spans):
                own = [i - origin for i, origin in zip(at, piece.origin, strict=False)]
                return piece.name, own[len(own) - len(piece.shape) :]
        return role, at


def _no_number(tensor: TensorSpec) -> CheckpointError:
    return CheckpointError(
        f"tensor {tensor.role} holds a code that is no number: quantise the model again or load "
        "the file again"
    )


def blocks(span: Range, step: int) -> Range:
    """Blocks of `step` that positions [start, stop) lie in; the plan made sure that none is cut."""
    start, stop = span
    return start // step, -(-stop // step)
