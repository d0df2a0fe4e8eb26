"""Fixtures of the operator tests: checked operators, a paged pool with garbage, a memory probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ops.registry import OpSet
from ops.spec import Capability


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(20)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ops() -> OpSet:
    """The reference with every call's contract checked."""
    return OpSet(Capability("reference"), check_contracts=True)


class _LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that owns new memory, and the names of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.calls: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.add(func.overloadpacket.__name__)
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                bytes_held = value.untyped_storage().nbytes()
                self.elements = max(self.elements, bytes_held // value.element_size())
        return result


@pytest.fixture
def largest_tensor() -> Callable[[], _LargestTensor]:
    return _LargestTensor


@pytest.fixture
def paged() -> Callable[[Tensor, int, int], tuple[Tensor, Tensor]]:
    """Spread rows [B, n, ...] over shuffled pages; everything not written is NaN."""

    def spread(rows: Tensor, page: int, spare_pages: int = 2) -> tuple[Tensor, Tensor]:
        batch, length = rows.shape[:2]
        per_row = -(-length // page)
        total = batch * per_row + spare_pages
        pool = torch.full((total, page, *rows.shape[2:]), float("nan"), dtype=rows.dtype)
        table = torch.randperm(total)[: batch * per_row].view(batch, per_row)
        for row in range(batch):
            for index in range(length):
                pool[table[row, index // page], index % page] = rows[row, index]
        return pool, table

    return spread


@pytest.fixture(scope="session")
def bare_ops() -> OpSet:
    """The reference as it serves: nothing checked."""
    return OpSet(Capability("reference"))
