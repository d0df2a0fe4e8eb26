"""What config.json claims about low-bit formats, beside what the tensors show.

The tensors count: configs of converted checkpoints are often those of the original. What differs
becomes a remark, so that a mix-up of files is seen. Sources: `quantization_config` as
compressed-tensors, ModelOpt and the GPTQ family write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from placement.formats import Code, WeightFormat
from placement.spec import TensorSpec

# Formats that a quantisation method can mean; other methods can mean any.
METHOD_FORMATS = {
    "fp8": ("fp8_block128", "fp8_channel", "fp8_tensor"),
    "fbgemm_fp8": ("fp8_channel",),
}
TABLE_FORMAT = "fp8_tensor"  # of n-gram tables, which no config describes
CODES = {"int": (Code.INTEGER,), "float": (Code.E4M3, Code.E2M1)}


@dataclass(frozen=True)
class Claim:
    """One group of a config. None: it doesn't say; group 0: a scale a row, or a matrix."""

    bits: int | None = None
    group: int | None = None
    symmetric: bool | None = None
    kind: str | None = None

    def fits(self, form: WeightFormat, columns: frozenset[int]) -> bool:
        """`columns` of the matrices in `form`: one group may be as long as a row."""
        groups = {form.group, 0} if columns == {form.group} else {form.group}
        symmetric = not form.zero_bytes
        return (
            self.bits in (None, form.bits)
            and self.symmetric in (None, symmetric)
            and (self.kind not in CODES or form.code in CODES[self.kind])
            and (self.group is None or self.group in groups)
        )

    def __str__(self) -> str:
        said = [] if self.bits is None else [f"{self.bits}-bit"]
        said += [self.kind] if self.kind else []
        if self.group is not None:
            said += [f"groups of {self.group}" if self.group else "a scale a row"]
        if self.symmetric is not None:
            said += ["symmetric" if self.symmetric else "with zero points"]
        return " ".join(said)


def remarks_on(
    quantisation: Mapping[str, Any] | None, tensors: Iterable[TensorSpec]
) -> tuple[str, ...]:
    """Where the config claims another format than the headers show."""
    columns: dict[WeightFormat, set[int]] = {}
    for one in tensors:
        if one.format is not None:
            columns.setdefault(one.format, set()).add(one.shape[-1])
    found = {form.name for form in columns}
    shown = ", ".join(sorted(found)) or "plain floats"
    if quantisation is None:
        return (f"config.json names no quantisation, tensors are {shown}",) if found else ()
    method = str(quantisation.get("quant_method"))
    meant = METHOD_FORMATS.get(method)
    if not found or (meant is not None and not found & set(meant)):
        return (f"config.json claims quantisation {method}, tensors are {shown}",)
    try:
        claims = tuple(_claims(quantisation))
    except (TypeError, ValueError):
        return (f"config.json has groups of formats that can't be read, tensors are {shown}",)
    return tuple(_differences(claims, columns))


def _differences(
    claims: tuple[Claim, ...], columns: Mapping[WeightFormat, set[int]]
) -> Iterator[str]:
    """A line a format that no claim fits, and a line a claim that fits no format."""
    said = "; ".join(map(str, claims))
    shown = ", ".join(sorted(form.name for form in columns))
    forms = {f: frozenset(widths) for f, widths in columns.items() if f.name != TABLE_FORMAT}
    for form, widths in sorted(forms.items(), key=lambda item: item[0].name):
        if claims and not any(claim.fits(form, widths) for claim in claims):
            yield f"config.json claims {said}, but tensors are {form.name}, which counts"
    for claim in claims:
        if not any(claim.fits(form, widths) for form, widths in forms.items()):
            yield f"config.json claims {claim}, which no tensor is; tensors are {shown}"


def _claims(quantisation: Mapping[str, Any]) -> Iterator[Claim]:
    """TypeError or ValueError for what is no description of formats."""
    groups = quantisation.get("config_groups")
    if groups is None:
        bits, group = quantisation.get("bits"), quantisation.get("group_size")
        if bits is not None or group is not None:
            yield Claim(_count(bits), _group(group, None), _flag(quantisation.get("sym")))
        return
    for one in _object(groups).values():
        weights = _object(one).get("weights")
        if weights is None:  # activations only
            continue
        claimed = _object(weights)
        block = claimed.get("block_structure")
        group = (
            block[1] if isinstance(block, list) and len(block) == 2 else claimed.get("group_size")
        )
        kind = claimed.get("type")
        yield Claim(
            _count(claimed.get("num_bits")), _group(group, claimed.get("strategy")),
            _flag(claimed.get("symmetric")), kind if isinstance(kind, str) else None,
        )  # fmt: skip


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return value


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int:
        raise TypeError
    return value


def _group(value: Any, strategy: Any) -> int | None:
    """-1 and a strategy without groups: a scale a row."""
    if value is None:
        return 0 if strategy in ("channel", "tensor") else None
    return max(_count(value) or 0, 0)


def _flag(value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise TypeError
    return value
