"""Run scenarios of collectives in real processes and print what each rank saw as JSON lines.

Reads lines `SCENARIO COMM WORLD_SIZE SEED OUT_DIR`; after each gang it prints an empty line. torch
is imported once and the ranks are forked from this process, which itself never uses it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from placement.config import EngineConfig
from placement.errors import RankError
from rank_worker.comm import Comm, make_comm
from rank_worker.comm_store import listen

SIZES = (1, 3, 1023, 4096, 300_001)  # the last one is larger than a shared-memory half
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
PLAN_SIZES = (0, 1, 511, 512, 5000)


def part(seed: int, rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank contributes: a wide range of magnitudes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    x = torch.randn(size, generator=generator) * 10 ** torch.randint(
        -3, 3, (size,), generator=generator
    )
    return x.to(dtype)


def as_bytes(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).numpy()


def sums(comm: Comm, seed: int, out: Path) -> str:
    seen: dict[str, np.ndarray] = {}
    for dtype in DTYPES:
        for size in SIZES:
            x = part(seed, comm.rank, size, dtype)
            assert comm.all_reduce_(x) is x
            seen[f"sum {dtype} {size}"] = as_bytes(x)
            gathered = comm.all_gather(part(seed, comm.rank, size, dtype).view(1, size))
            seen[f"gather {dtype} {size}"] = as_bytes(gathered)
    strided = part(seed, comm.rank, 12, torch.float32).view(3, 4).t()
    seen["strided"] = as_bytes(comm.all_reduce_(strided))
    for repeat in range(200):
        x = torch.full((17,), float(comm.rank + repeat))
        seen[f"repeat {repeat}"] = as_bytes(comm.all_reduce_(x))
    for size in PLAN_SIZES:
        words = np.arange(size, dtype=np.int32) * 7 + seed
        if comm.rank == 0:
            comm.send_plan(words)
        seen[f"plan {size}"] = words if comm.rank == 0 else comm.receive_plan()
    comm.barrier()
    assert comm.seconds > 0
    seen["entered"] = np.array(comm.entered)
    np.savez(out / f"rank{comm.rank}.npz", **seen)
    comm.barrier()
    comm.close()
    return "done"


def dead_peer(comm: Comm, seed: int, out: Path) -> str:
    comm.all_reduce_(torch.ones(8))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce_(torch.ones(8))
    return "not noticed"


def dead_leader(comm: Comm, seed: int, out: Path) -> str:
    comm.barrier()
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.receive_plan()
    return "not noticed"


def different_steps(comm: Comm, seed: int, out: Path) -> str:
    x = torch.ones(8)
    comm.all_gather(x) if comm.rank == 1 else comm.all_reduce_(x)
    return "not noticed"


def other_order(comm: Comm, seed: int, out: Path) -> str:
    """A gather and a sum of other sizes, which fit a frame or don't."""
    small, large = torch.ones(8), torch.ones(4096)
    steps = [lambda: comm.all_gather(small), lambda: comm.all_reduce_(large)]
    comm.all_gather(small)
    for step in reversed(steps) if comm.rank == 1 else steps:
        step()
    return "not noticed"


def wait_for_kill(comm: Comm, seed: int, out: Path) -> str:
    comm.all_reduce_(torch.ones(8))
    maps = Path("/proc/self/maps").read_text()
    report(comm.rank, "shared" if "nrank-collectives" in maps else "private", "/dev/shm" in maps)
    comm.receive_plan() if comm.rank else signal.pause()
    return "not killed"


SCENARIOS: dict[str, Callable[[Comm, int, Path], str]] = {
    f.__name__: f
    for f in (sums, dead_peer, dead_leader, different_steps, other_order, wait_for_kill)
}


def report(rank: int, result: str, detail: object = "") -> None:
    line = json.dumps({"rank": rank, "pid": os.getpid(), "result": result, "detail": detail})
    os.write(1, (line + "\n").encode())


def run_rank(
    rank: int, world: int, name: str, comm_name: str, seed: int, out: Path, pipe: tuple[int, int]
) -> None:
    torch.set_num_threads(1)
    config = EngineConfig(
        model_dir="", ranks=world, comm=comm_name, start_timeout_s=60, step_timeout_s=30
    )
    if name == "late_rank":
        config = replace(config, start_timeout_s=1, step_timeout_s=1)
    elif name == "dead_peer" and comm_name == "shm":  # with gloo a closed socket tells at once
        config = replace(config, step_timeout_s=3)
    try:
        if rank == 0:
            store, port = listen("127.0.0.1", 60)
            os.write(pipe[1], b"%8d" % port * (world - 1))
        else:
            store, port = None, int(os.read(pipe[0], 8))
        if name == "late_rank" and rank == 1:
            return
        comm = make_comm(config, rank, world, port, store)
        report(rank, SCENARIOS[name](comm, seed, out))
    except RankError as error:
        report(rank, "RankError", {"rank": error.rank, "message": str(error)})


def main() -> None:
    for line in sys.stdin:
        name, comm_name, world, seed, out = line.split()
        pipe = os.pipe()
        children = []
        for rank in range(int(world)):
            pid = os.fork()
            if pid == 0:
                run_rank(rank, int(world), name, comm_name, int(seed), Path(out), pipe)
                os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        for descriptor in pipe:
            os.close(descriptor)
        os.write(1, b"\n")


if __name__ == "__main__":
    main()
