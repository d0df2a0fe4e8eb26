"""python lowbit_steps.py CASES FILE: steps of packed models on a pretend chip, one after the other.

CASES is JSON, [[model directory, int8_activations], ...]. What is told of each goes to FILE as in
programs/engine.py: operators, a prefill chunk, decode steps, recorded ones; or the error. `codes`
are the types of the experts' codes on the chip, `wide` the bytes of the largest matrix made in a
step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent / "programs")]

from engine import Options, decode, nothing_to_compare, prefill, run_step  # noqa: E402
from standin import Standin  # noqa: E402

from placement.config import EngineConfig  # noqa: E402
from placement.errors import NrankError  # noqa: E402
from rank_worker.rank import Rank  # noqa: E402

STEPS = 4
SIZES = Options()


def tell(model_dir: str, int8_activations: bool) -> dict[str, Any]:
    config = EngineConfig(
        model_dir=model_dir, ranks=1, device="npu", dtype="float16", context_tokens=256,
        max_sequences=4, mtp=0, page_tokens=64, start_timeout_s=60.0, graphs=False,
        int8_activations=int8_activations,
    )  # fmt: skip
    rank = Rank(config, 0, 1)
    rank.open(0)
    rank.load()
    assert rank.runner is not None
    model, standin = rank.runner.model, Standin()
    experts = [layer.channel.experts for layer in model.layers]
    told = {
        "ops": {one.op: one.implementation for one in model.ops.op_info()},
        "codes": sorted(
            {f"{e.gate_up.codes.device.type} {e.gate_up.codes.dtype}" for e in experts}
        ),
        "prefill": run_step(rank, standin, prefill(SIZES)),
        "steps": [run_step(rank, standin, decode(SIZES, step)) for step in range(STEPS)],
    }
    rank.runner.record_graphs()
    graphs = rank.runner.graphs.counts
    return {
        **told,
        "refused": graphs.refused,
        "recorded": run_step(rank, standin, decode(SIZES, STEPS)),
    }


def outcome(model_dir: str, int8_activations: bool) -> dict[str, Any]:
    try:
        return tell(model_dir, int8_activations)
    except NrankError as error:
        return {"error": str(error)}


nothing_to_compare()
told = [outcome(*case) for case in json.loads(sys.argv[1])]
Path(sys.argv[2]).write_text(json.dumps(told))
os._exit(0)
