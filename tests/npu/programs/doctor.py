"""python doctor.py OPS_FILE FILE: `nrank doctor --ops` on a pretend chip; a rank that obeys it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from deploy.doctor.operators import probe_operators  # noqa: E402
from ops.capability_file import with_results  # noqa: E402
from ops.registry import OpSet  # noqa: E402
from placement.models.registry import load_model_spec  # noqa: E402
from rank_worker.device import open_device  # noqa: E402
from rank_worker.model import parameter_dtype  # noqa: E402
from rank_worker.op_probe import sizes_of  # noqa: E402

path, dtype = Path(sys.argv[1]), parameter_dtype("float16")
model_dir = str(ROOT / "deploy" / "models" / "tiny-flash-next")
findings = probe_operators("npu", model_dir, "float16", path)
device = open_device("npu")
device.begin(0, dtype)
sizes = sizes_of(load_model_spec(model_dir)[0])
chosen = OpSet(with_results(device.capability(dtype), sizes, path)).op_info()
told = {
    "findings": [asdict(finding) for finding in findings],
    "backends": {one.op: one.backend for one in chosen},
}
Path(sys.argv[2]).write_text(json.dumps(told))
os._exit(0)
