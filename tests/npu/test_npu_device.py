"""What the device layer refuses, chooses and tells, without a chip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.npu.soc import ATLAS_310P, ATLAS_A2, find_soc
from ops.registry import OpSet
from ops.spec import REFERENCE, Capability
from placement.config import EngineConfig
from placement.errors import ConfigError
from rank_worker.comm_device import hccl_environment

ROOT = Path(__file__).parents[2]
VERSIONS = (("torch_npu", "2.13.0"),)


def ops_of(capability: Capability) -> dict[str, str]:
    return {one.op: one.backend for one in OpSet(capability).op_info()}


@pytest.mark.parametrize(
    ("name", "profile"),
    [("Ascend310P3", ATLAS_310P), ("Ascend310P1", ATLAS_310P), ("Ascend910B3", ATLAS_A2),
     ("Ascend910_9362", ATLAS_A2)],
)  # fmt: skip
def test_profiles_are_chosen_by_soc(name: str, profile: object) -> None:
    assert find_soc(name) is profile


def test_an_unknown_chip_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'Ascend950' is not supported; known are Ascend310P\*"):
        find_soc("Ascend950")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
)
def test_a_310p_refuses_types_that_it_lacks(dtype: torch.dtype) -> None:
    reason = ATLAS_310P.refuses(dtype)
    assert reason == f"{str(dtype).removeprefix('torch.')} does not run on Ascend 310P"
    capability = Capability("npu", "Ascend310P3", dtype, VERSIONS)
    assert set(ops_of(capability).values()) == {REFERENCE}
    assert reason in {one.fallback_reason.split(": ", 1)[-1] for one in OpSet(capability).op_info()}


def test_bf16_runs_on_a2_alone() -> None:
    assert ATLAS_A2.refuses(torch.bfloat16) is None
    assert ATLAS_A2.refuses(torch.float64) is not None


def test_a_rank_refuses_to_start_in_bf16_on_a_310p(
    engines: Callable[..., list[dict[str, Any]]],
) -> None:
    (told,) = engines(dtype="bfloat16")
    assert told["error"] == (
        "--dtype bfloat16: bfloat16 does not run on Ascend 310P; use float16 or float32"
    )


@pytest.mark.parametrize("versions", [(), (("torch_npu", "2.9.1"),), (("torch_npu", "3.0.0"),)])
def test_other_versions_of_torch_npu_run_the_reference(versions: Any) -> None:
    assert set(ops_of(Capability("npu", "Ascend310P3", torch.float16, versions)).values()) == {
        REFERENCE
    }


@pytest.mark.parametrize("version", ["2.10.0.post4", "2.13.0", "2.14.0"])
def test_known_versions_run_the_variants(version: str) -> None:
    taken = ops_of(Capability("npu", "Ascend310P3", torch.float16, (("torch_npu", version),)))
    assert sum(backend == "npu" for backend in taken.values()) >= 14


def test_an_operator_that_failed_on_this_machine_is_left_to_the_reference() -> None:
    versions = (*VERSIONS, ("op:ops.npu.experts.moe_experts", "failed: 561103"))
    capability = Capability("npu", "Ascend310P3", torch.float16, versions)
    info = {one.op: one for one in OpSet(capability).op_info()}
    assert info["moe_experts"].backend == REFERENCE
    assert "the capability file says: failed: 561103" in info["moe_experts"].fallback_reason
    assert info["route"].backend == "npu"


@pytest.mark.parametrize(
    ("step_timeout_s", "limit"), [(20.0, "68"), (68.0, "68"), (69.0, "136"), (1e6, "17340")]
)
def test_time_limits_of_hccl_are_whole_steps_and_never_shorter(
    step_timeout_s: float, limit: str
) -> None:
    config = EngineConfig("", device="npu", step_timeout_s=step_timeout_s)
    told = hccl_environment(config)
    assert told["HCCL_EXEC_TIMEOUT"] == limit
    assert int(limit) % 68 == 0
    assert told["HCCL_BUFFSIZE"] == "200"
    assert told["HCCL_OP_EXPANSION_MODE"] == "HOST"


@pytest.mark.parametrize(
    ("environ", "cause"),
    [
        ({}, "lib"),  # the first library that the loader misses
        ({"ASCEND_HOME_PATH": "/nowhere"}, "ASCEND_HOME_PATH : /nowhere does not exist"),
    ],
    ids=["no CANN", "variables of a CANN that is gone"],
)
def test_without_cann_a_command_ends_with_one_line(
    libraries: Path, environ: dict[str, str], cause: str
) -> None:
    """torch would load torch_npu itself, and fail with it."""
    own = {name: value for name, value in os.environ.items() if "AUTOLOAD" not in name}
    if environ:
        own |= {"LD_LIBRARY_PATH": str(libraries)}
    command = ["generate", "--device", "npu", "--dtype", "float16", "--chat", "Hello."]
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *command], env={**own, **environ}, cwd=ROOT,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("nrank: "))
    assert done.returncode == 2
    assert line.startswith(f"nrank: --device npu: torch_npu can't be loaded ({cause}")
    assert "Traceback" not in done.stderr


def test_doctor_sees_that_nothing_is_computed_and_the_reference_runs_then(
    program: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A chip whose operators all give wrong results: what a pretend chip is."""
    told = program("doctor.py", str(tmp_path / "ops.json"))
    assert len(told["findings"]) >= 14
    assert all(found["found"].startswith("failed: off by") for found in told["findings"])
    assert set(told["backends"].values()) == {REFERENCE}
    kept = json.loads((tmp_path / "ops.json").read_text())["identity"]
    assert (kept["soc"], kept["dtype"], kept["torch_npu"][:6]) == (
        "Ascend310P3",
        "float16",
        "2.13.0",
    )
    assert kept["CANN"] == "9.1.0"
    assert kept["model"].startswith("qwen4_exp/192/")
