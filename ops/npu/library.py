"""The way to torch_npu's operators: loaded when first needed, and only those of the manifest.

torch_npu is imported nowhere else in `ops`. Its import fails on a machine without CANN, so nothing
may import it before a rank opens its device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ops.npu.manifest import MANIFEST, Evidence
from ops.spec import ContractError


class NpuLibrary:
    """Operators as attributes, `npu_rms_norm` for one.

    ContractError for one that is not in the manifest, or there for its schema alone.
    `find` gives the namespace that holds an operator: "npu" or "atb".
    """

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = MANIFEST.get(name)
        if call is None:
            raise ContractError(
                f"{name} is not in ops/npu/manifest.py: enter its schema and evidence first"
            )
        if Evidence.SCHEMA in call.evidence:
            raise ContractError(
                f"{name} is in ops/npu/manifest.py for its schema alone: enter why it would run"
            )
        function: Callable[..., Any] = getattr(self._find(call.namespace), name)
        setattr(self, name, function)
        return function


@functools.cache
def library() -> NpuLibrary:
    """The operators of the installed torch_npu; ImportError where there is none."""
    importlib.import_module("torch_npu")
    ops = importlib.import_module("torch").ops
    return NpuLibrary(lambda namespace: getattr(ops, namespace))
