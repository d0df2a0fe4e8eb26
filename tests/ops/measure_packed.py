"""Packed products on this machine beside what torch offers: `python -m tests.ops.measure_packed`.

One thread, weights [1280, 2560] (gate over up of an expert of the 169 GiB model), so many copies in
turn that none is in the cache. The systems take turns, too; a line has the best of all rounds, as
microseconds a product, and what they are of the plain float32 product.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ops.lowbit.pack import quantise
from ops.lowbit.packed import split_codes
from ops.registry import OpSet
from ops.spec import Capability
from placement import formats
from rank_worker.device import open_device

OUTS, INS, COPIES, ROUNDS = 1280, 2560, 12, 15
ROWS = (1, 4, 8, 16)
Product = Callable[[int, Tensor], Tensor]


def systems() -> Iterator[tuple[str, Product]]:
    ops = OpSet(Capability("cpu"))
    values = torch.randn(OUTS, INS) * INS**-0.5
    pack = open_device("cpu").pack_linear
    plain = [pack(values.clone()) for _ in range(COPIES)]
    yield "float32 (kernel of this project)", lambda i, x: ops.linear(x, plain[i])
    half = [values.bfloat16() for _ in range(COPIES)]
    yield "bfloat16 F.linear", lambda i, x: torch.nn.functional.linear(x.bfloat16(), half[i])
    for form in (formats.W4G128, formats.W4G32, formats.NVFP4, formats.W8_SYM):
        held = [quantise(values, form) for _ in range(COPIES)]
        for name, rounded in ((f"{form.name} A16", False), (f"{form.name} A8", True)):
            yield name, lambda i, x, h=held, r=rounded: ops.packed_linear(x, h[i], r)  # type: ignore[misc]
    yield from torch_int4(values)
    yield from torch_int8(values)


def torch_int4(values: Tensor) -> Iterator[tuple[str, Product]]:
    for form in (formats.W4G128, formats.W4G32):
        packed = quantise(values, form)
        codes = (split_codes(packed.codes, 4) ^ 8).int()
        scale = packed.scale.t().bfloat16()
        pairs = torch.stack((scale, torch.zeros_like(scale)), dim=-1).contiguous()
        held = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2) for _ in range(COPIES)]

        def product(i: int, x: Tensor, held: list[Tensor] = held, g: int = form.group,
                    pairs: Tensor = pairs) -> Tensor:  # fmt: skip
            return torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), held[i], g, pairs)

        yield f"_weight_int4pack_mm_for_cpu bfloat16 g{form.group}", product


def torch_int8(values: Tensor) -> Iterator[tuple[str, Product]]:
    scale = values.abs().amax(dim=1) / 127
    zero = torch.zeros(OUTS, dtype=torch.int64)
    coded = torch.quantize_per_channel(values, scale.double(), zero, 0, torch.qint8)
    held = [torch.ops.quantized.linear_prepack(coded, None) for _ in range(COPIES)]
    yield (
        "quantized::linear_dynamic int8 (fbgemm)",
        lambda i, x: torch.ops.quantized.linear_dynamic(x, held[i], True),
    )
    codes = [coded.int_repr() for _ in range(COPIES)]
    scales = scale.bfloat16()
    yield (
        "_weight_int8pack_mm bfloat16",
        lambda i, x: torch.ops.aten._weight_int8pack_mm(x.bfloat16(), codes[i], scales),
    )


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    known = list(systems())
    print(f"{'':45}" + "".join(f"{f'{rows} rows':>16}" for rows in ROWS))
    table: dict[str, list[float]] = {name: [] for name, _ in known}
    for rows in ROWS:
        x = torch.randn(rows, INS)
        best = dict.fromkeys(table, float("inf"))
        for _ in range(ROUNDS):
            for name, product in known:
                began = time.perf_counter()
                for i in range(COPIES):
                    product(i, x)
                best[name] = min(best[name], (time.perf_counter() - began) / COPIES * 1e6)
        for name, micros in best.items():
            table[name].append(micros)
    first = table[known[0][0]]
    for name, times in table.items():
        cells = [f"{t:9.0f} {t / f:5.2f}x" for t, f in zip(times, first, strict=True)]
        print(f"{name:45}" + "".join(cells))


if __name__ == "__main__":
    main()
