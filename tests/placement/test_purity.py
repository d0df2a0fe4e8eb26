"""Placement stands alone: no torch, ray or numpy, and little memory at the real size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
BLOCKED_IMPORTS = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "ray", "numpy"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import placement
names = [m.name for m in pkgutil.walk_packages(placement.__path__, "placement.")]
for name in names:
    importlib.import_module(name)
from placement.config import EngineConfig
from placement.models.registry import load_model_spec
from placement.plan import make_plan
spec, headers = load_model_spec(sys.argv[1])
assert make_plan(EngineConfig(sys.argv[1], ranks=4), spec, headers).fits
print(len(names))
"""
REAL_SIZE = """
import sys
from placement.config import EngineConfig
from placement.models.registry import load_model_spec
from placement.plan import make_plan
from placement.reads import plan_reads
spec, headers = load_model_spec(sys.argv[1])
plan = make_plan(EngineConfig(sys.argv[1], ranks=6, usable_bytes=400 << 30), spec, headers)
assert plan.fits
assert len(spec.tensors[-2].pieces) >= 512
plan_reads(spec.tensors, plan.shares[0], headers)
status = open("/proc/self/status").read()  # ru_maxrss counts the parent's size before exec, too
print(status.split("VmHWM:")[1].split()[0])
"""


def run_python(code: str, argument: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, str(argument)],
        cwd=REPO, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_placement_imports_neither_torch_nor_ray_nor_numpy(embedded_dir: Path) -> None:
    assert int(run_python(BLOCKED_IMPORTS, embedded_dir)) >= 15


def test_planning_the_real_size_stays_below_300_mib(
    tmp_path: Path, real_config: dict[str, Any], make_headers: Any
) -> None:
    """A sparse 360 GB file with the 75,000 tensors of the per-expert layout."""
    headers = make_headers(real_config, per_expert=True, shards=128)
    entries = {
        name: {
            "dtype": header.dtype,
            "shape": list(header.shape),
            "data_offsets": [header.offset, header.offset + header.nbytes],
        }
        for name, header in headers.tensors.items()
    }
    text = json.dumps(entries).encode()
    end = max(header.offset + header.nbytes for header in headers.tensors.values())
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        os.truncate(file.fileno(), 8 + len(text) + end)
    (tmp_path / "config.json").write_text(json.dumps(real_config))
    peak_kib = int(run_python(REAL_SIZE, tmp_path))
    assert peak_kib < 300 * 1024
