"""The embedded model on NVIDIA GPUs: its golden ids in fp32, and tokens a second beside bandwidth.

Needs torch with CUDA, numpy and safetensors, no Ray and no pytest:
`python tests/rank_worker/measure_cuda.py RANKS [RANKS ...]` prints one JSON line a run and exits
with 1 when an id is wrong. Each number of ranks runs with decode graphs and without, with two
drafts a step and without.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from placement.config import EngineConfig  # noqa: E402
from rank_worker.launch import Engine, launch_engine  # noqa: E402
from rank_worker.messages import EngineRequest  # noqa: E402

MARGIN = 2e-4  # below it two correct implementations may choose differently
TOKENS = 256
GIB = 1 << 30


def golden() -> list[tuple[list[int], list[int], int]]:
    """Prompt, ids of the reference, and how many of them are comparable."""
    cases = []
    with np.load(ROOT / "tests" / "golden" / "embedded.npz") as arrays:
        for length in json.loads(str(arrays["meta"]))["lengths"]:
            prompt, ids, margins = (arrays[f"{length}/{n}"] for n in ("prompt", "ids", "margins"))
            close = np.flatnonzero(margins < MARGIN)
            count = int(close[0]) if len(close) else len(ids)
            cases.append((prompt.tolist(), ids.tolist(), count))
    return cases


def wrong_ids(engine: Engine) -> tuple[int, int]:
    """(compared, wrong) of all golden prompts, all at once and then one by one."""
    cases, compared, wrong = golden(), 0, 0
    requests = [
        EngineRequest(f"r{i}", tuple(prompt), len(ids), ignore_eos=True)
        for i, (prompt, ids, _) in enumerate(cases)
    ]
    alone = [engine.generate([request])[0] for request in requests]
    for results in (engine.generate(requests), alone):
        for (_, ids, count), result in zip(cases, results, strict=True):
            compared += count
            wrong += sum(a != b for a, b in zip(ids[:count], result.token_ids[:count], strict=True))
    return compared, wrong


def tokens_per_s(engine: Engine, concurrency: int) -> float:
    """Decoded tokens a second of `concurrency` answers together, the best of three runs."""
    prompt = golden()[0][0]
    best = 0.0
    for _ in range(3):
        requests = [
            EngineRequest(f"c{i}", tuple(prompt), TOKENS, ignore_eos=True)
            for i in range(concurrency)
        ]
        results = engine.generate(requests)
        began = min(result.ttft_s for result in results)
        ended = max(result.last_token_s for result in results)
        best = max(best, concurrency * (TOKENS - 1) / (ended - began))
    return best


def copy_bytes_per_s() -> dict[str, float]:
    """Bytes read and written a second inside the GPU, and bytes a second from pinned memory."""
    source, target = (torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    told = {}
    for name, read, factor in (("device", source, 2), ("host_to_device", host, 1)):
        target.copy_(read)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            target.copy_(read, non_blocking=True)
        torch.cuda.synchronize()
        told[name] = factor * 10 * GIB / (time.perf_counter() - began)
    return told


def measure(ranks: int, graphs: bool, mtp: int) -> dict[str, Any]:
    config = EngineConfig(
        str(ROOT / "deploy" / "models" / "tiny-flash-next"), ranks=ranks, device="cuda",
        dtype="float32", context_tokens=2048, kv_pool_tokens=16384, page_tokens=16,
        max_sequences=8, graphs=graphs, mtp=mtp, chips=ranks,
    )  # fmt: skip
    with launch_engine(config) as engine:
        compared, wrong = wrong_ids(engine)
        runner = engine.rank0.runner
        assert runner is not None
        told = {
            "ranks": ranks, "graphs": graphs, "mtp": mtp,
            "compared_ids": compared, "wrong_ids": wrong,
            "tokens_per_s": {c: round(tokens_per_s(engine, c), 1) for c in (1, 4)},
            "replayed": runner.graphs.counts.replayed, "eager": runner.graphs.counts.eager,
            "refused": runner.graphs.counts.refused,
        }  # fmt: skip
    return told


def main() -> int:
    logging.basicConfig(level=logging.WARNING)
    wrong = 0
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for ranks in map(int, sys.argv[1:]):
        for graphs, mtp in product((False, True), (0, 2)):
            told = measure(ranks, graphs, mtp)
            print(json.dumps(told), flush=True)
            wrong += told["wrong_ids"]
    print(json.dumps({"copy_bytes_per_s": copy_bytes_per_s()}))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
