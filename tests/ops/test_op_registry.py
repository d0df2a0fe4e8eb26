"""Which implementation is taken, what is refused and how it is told."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ops import registry
from ops.contracts import CONTRACTS
from ops.registry import REFERENCES, OpSet, register, resolve
from ops.spec import Capability, ContractError, Implementation


def _plain(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return x * 0 + 1


def _fused(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return x * 0 + 2


def _needs_new_driver(capability: Capability) -> str | None:
    return None if capability.version("driver") == "2" else "driver 2 is needed"


@pytest.fixture
def variants() -> tuple[Implementation, ...]:
    return (
        register("rms_norm", _plain, "made_up", priority=1),
        register("rms_norm", _fused, "made_up", priority=5, requires=_needs_new_driver),
    )


def _kind(ops: OpSet) -> float:
    return float(ops.rms_norm(torch.zeros(1, 1), torch.ones(1), 1e-6))


def test_the_highest_priority_that_can_run_is_taken(variants: tuple[Implementation, ...]) -> None:
    new = Capability("made_up", versions=(("driver", "2"),))
    assert _kind(OpSet(new, variants=variants)) == 2
    assert _kind(OpSet(Capability("made_up"), variants=variants)) == 1
    assert _kind(OpSet(Capability("another"), variants=variants)) == 0


def test_a_refused_variant_is_told_with_its_reason(variants: tuple[Implementation, ...]) -> None:
    resolution = resolve("rms_norm", Capability("made_up"), variants)
    assert resolution.implementation.function is _plain
    assert [reason for _, reason in resolution.refused] == ["driver 2 is needed"]


def test_choice_and_fallback_are_logged_once(
    variants: tuple[Implementation, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="ops.registry"):
        ops = OpSet(Capability("made_up"), variants=variants)
        for _ in range(3):
            _kind(ops)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "driver 2 is needed" in warnings[0]
    assert len(caplog.records) == 2


def test_op_info_lists_every_operator(variants: tuple[Implementation, ...]) -> None:
    info = {i.op: i for i in OpSet(Capability("made_up"), variants=variants).op_info()}
    assert set(info) == set(REFERENCES)
    assert info["rms_norm"].backend == "made_up"
    assert "driver 2 is needed" in info["rms_norm"].fallback_reason
    assert info["route"].backend == "reference"
    assert info["route"].fallback_reason == ""


def test_a_variant_with_other_parameters_is_refused() -> None:
    with pytest.raises(ContractError, match=r"rms_norm: .*\['x', 'weight'\]"):
        register("rms_norm", lambda x, weight: x, "made_up")


def test_an_unknown_operator_is_named() -> None:
    with pytest.raises(ContractError, match="rms_morn"):
        register("rms_morn", _plain, "made_up")
    with pytest.raises(ContractError, match="rms_morn"):
        resolve("rms_morn", Capability("made_up"), ())
    with pytest.raises(AttributeError, match="rms_morn"):
        _ = OpSet(Capability("made_up")).rms_morn


def test_a_backend_brings_its_variants_in_a_file(
    variants: tuple[Implementation, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, module = ModuleType("ops.made_up"), ModuleType("ops.made_up.variants")
    module.VARIANTS = variants  # type: ignore[attr-defined]
    for loaded in (package, module):
        loaded.__spec__ = registry.importlib.machinery.ModuleSpec(loaded.__name__, None)
        monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
    assert _kind(OpSet(Capability("made_up"))) == 1


def test_a_backend_without_variants_runs_the_reference() -> None:
    info = OpSet(Capability("made_up")).op_info()
    assert {i.backend for i in info} == {"reference"}


def test_every_operator_has_a_contract_on_its_own_parameters() -> None:
    assert set(CONTRACTS) == set(REFERENCES)
    for op, contract in CONTRACTS.items():
        known = registry._parameters(REFERENCES[op].function)
        named = [n for n, _ in contract.shapes + contract.dtypes]
        named += [n for n, _, _ in contract.ranges]
        assert set(named) <= set(known), op


def test_variants_of_the_machines_backends_have_the_reference_parameters() -> None:
    for backend in ("cpu", "cuda", "npu"):
        for variant in registry.variants_of(backend):
            again = register(variant.op, variant.function, backend)
            assert again.op == variant.op
