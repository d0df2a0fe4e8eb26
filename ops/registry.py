"""Which implementation of each operator a rank runs, and why.

The reference is always in the table. A backend's faster variants are the tuple `VARIANTS` in
`ops/<backend>/variants.py`, made with `register`; nothing registers itself by being imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

from ops.contracts import CONTRACTS, Contract
from ops.reference import (
    attention,
    conv,
    delta,
    dense,
    hyper,
    moe,
    ngram,
    norm,
    packed,
    rope,
    sampling,
    select,
    verify,
)
from ops.spec import (
    PASSED,
    PROBED,
    REFERENCE,
    Capability,
    ContractError,
    Implementation,
    OpInfo,
    Requirement,
    Resolution,
    no_requirement,
)

_log = logging.getLogger(__name__)

_REFERENCE_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    norm.unit_offset,
    norm.rms_norm,
    norm.grouped_rms_norm,
    norm.gated_rms_norm,
    rope.rope_tables,
    rope.apply_rope,
    conv.causal_conv_chunk,
    conv.causal_conv_step,
    dense.linear,
    delta.delta_gates,
    delta.gated_delta_step,
    delta.gated_delta_chunk,
    verify.causal_conv_verify,
    verify.window_commit_,
    verify.gated_delta_verify,
    verify.gated_delta_commit_,
    hyper.hyper_mix,
    hyper.hyper_inject_,
    select.index_keys,
    select.select_blocks,
    attention.write_kv_,
    attention.paged_attention,
    moe.route,
    moe.moe_experts,
    moe.gated_swiglu,
    moe.swiglu_mlp,
    packed.packed_linear,
    packed.packed_experts,
    packed.packed_table_rows,
    ngram.ngram_ids,
    ngram.ngram_gate,
    ngram.table_rows,
    sampling.greedy,
    sampling.gumbel,
    sampling.sample,
    sampling.sample_local,
    sampling.nonfinite_rows,
)
REFERENCES: dict[str, Implementation] = {
    f.__name__: Implementation(f.__name__, REFERENCE, f, priority=-1) for f in _REFERENCE_FUNCTIONS
}


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def register(
    op: str,
    function: Callable[..., Any],
    backend: str,
    priority: int = 0,
    requires: Requirement = no_requirement,
) -> Implementation:
    """A variant of `op`; ContractError for an unknown operator or other parameters than its own."""
    if op not in REFERENCES:
        raise ContractError(f"{op}: no such operator; known are {', '.join(sorted(REFERENCES))}")
    expected = _parameters(REFERENCES[op].function)
    if _parameters(function) != expected:
        raise ContractError(
            f"{op}: {function.__module__}.{function.__name__} takes {_parameters(function)}, "
            f"the reference takes {expected}; give the variant the same parameters"
        )
    return Implementation(op, backend, function, priority, requires)


def variants_of(backend: str) -> tuple[Implementation, ...]:
    """What `ops/<backend>/variants.py` offers; nothing when the backend has no such file."""
    package = f"ops.{backend}"
    if importlib.util.find_spec(package) is None:
        return ()
    if importlib.util.find_spec(f"{package}.variants") is None:
        return ()
    variants: tuple[Implementation, ...] = importlib.import_module(f"{package}.variants").VARIANTS
    return variants


def _failed_before(candidate: Implementation, capability: Capability) -> str | None:
    """What the capability file says of it, where that is not that it passed."""
    result = capability.version(PROBED + candidate.name)
    return None if result in (None, PASSED) else f"the capability file says: {result}"


def resolve(
    op: str, capability: Capability, variants: Iterable[Implementation] | None = None
) -> Resolution:
    """The highest-priority implementation whose requirement holds; at last the reference."""
    if op not in REFERENCES:
        raise ContractError(f"{op}: no such operator; known are {', '.join(sorted(REFERENCES))}")
    known = variants_of(capability.backend) if variants is None else variants
    candidates = [v for v in known if v.op == op and v.backend == capability.backend]
    refused: list[tuple[str, str]] = []
    for candidate in sorted(candidates, key=lambda v: -v.priority):
        reason = _failed_before(candidate, capability) or candidate.requires(capability)
        if reason is None:
            return Resolution(candidate, tuple(refused))
        refused.append((candidate.name, reason))
    return Resolution(REFERENCES[op], tuple(refused))


def _checked(op: str, function: Callable[..., Any], contract: Contract) -> Callable[..., Any]:
    signature = inspect.signature(REFERENCES[op].function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        contract.check(op, bound.arguments)
        return function(*args, **kwargs)

    return checked


class OpSet:
    """Every operator as an attribute, resolved once for one rank's device.

    With `check_contracts` each call is checked first and raises ContractError.
    """

    def __init__(
        self,
        capability: Capability,
        check_contracts: bool = False,
        variants: Iterable[Implementation] | None = None,
    ) -> None:
        self.dtype = capability.dtype
        known = variants_of(capability.backend) if variants is None else tuple(variants)
        self._resolutions = {op: resolve(op, capability, known) for op in REFERENCES}
        for op, resolution in self._resolutions.items():
            function = resolution.implementation.function
            setattr(
                self, op, _checked(op, function, CONTRACTS[op]) if check_contracts else function
            )
        self._log_choice(capability)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"no operator {name!r}; known are {', '.join(sorted(REFERENCES))}")

    def _log_choice(self, capability: Capability) -> None:
        taken = [r.implementation for r in self._resolutions.values()]
        faster = [i.name for i in taken if i.backend != REFERENCE]
        _log.info(
            "%d operators for %s, %d of them the reference; variants: %s",
            len(taken),
            capability.backend,
            len(taken) - len(faster),
            ", ".join(faster) or "none",
        )
        by_reason: dict[str, list[str]] = {}
        for op, resolution in self._resolutions.items():
            for _, reason in resolution.refused:
                ops = by_reason.setdefault(reason, [])
                if op not in ops:
                    ops.append(op)
        for reason, ops in by_reason.items():
            _log.warning("faster variants not taken (%s): %s", reason, ", ".join(ops))

    def op_info(self) -> list[OpInfo]:
        """The choice for each operator, in a fixed order."""
        return [
            OpInfo(
                op,
                r.implementation.name,
                r.implementation.backend,
                "; ".join(f"{name}: {reason}" for name, reason in r.refused),
            )
            for op, r in self._resolutions.items()
        ]
