"""One rank of the embedded model on a pretend chip: load, a prefill chunk, decode steps.

python engine.py RANK PORT OPTIONS FILE: OPTIONS is JSON, see Options; what is told goes to FILE as
JSON, see `main`. Nothing is computed, so what a step samples means nothing and the ranks'
decisions are not compared; everything else is the engine as it is.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from standin import Standin  # noqa: E402

from ops.contracts import CONTRACTS  # noqa: E402
from placement.config import EngineConfig  # noqa: E402
from placement.errors import NrankError, RankError  # noqa: E402
from rank_worker.comm_store import listen  # noqa: E402
from rank_worker.decode_graphs import DecodeGraphs  # noqa: E402
from rank_worker.device_npu import FRACTAL_NZ, NpuDevice  # noqa: E402
from rank_worker.rank import Rank  # noqa: E402
from rank_worker.runner import Runner  # noqa: E402
from rank_worker.step_plan import (  # noqa: E402
    Admit,
    Opcode,
    PageUpdate,
    Row,
    RowFlag,
    StepPlan,
)


@dataclass(frozen=True)
class Options:
    """What a test asks for."""

    ranks: int = 1
    steps: int = 6
    sequences: int = 2
    prompt_tokens: int = 37
    mtp: int = 0
    dtype: str = "float16"
    context_tokens: int = 512
    prefix_cache: bool = False
    model: str = "tiny-flash-next"
    int8_activations: bool = False
    memory_only: bool = False  # nothing after the load


PAGE_TOKENS = 64
torch_npu: Any = None  # loaded with the device


def host_read(runner: Runner) -> None:
    """An `.item()` in the decode loop."""
    whole = runner.model.ops.route

    def route(*arguments: Any) -> Any:
        weights, ids = whole(*arguments)
        ids[0, 0].item()
        return weights, ids

    runner.model.ops.route = route  # type: ignore[method-assign]


def fresh_tensor(runner: Runner) -> None:
    """A tensor that a step makes and nobody frees."""
    whole, held = runner.model.ops.greedy, []

    def greedy(logits: torch.Tensor) -> torch.Tensor:
        held.append(torch.empty(1 << 20, dtype=torch.int8, device=logits.device))
        return whole(logits)

    runner.model.ops.greedy = greedy  # type: ignore[method-assign]
    whole_local = runner.model.ops.sample_local

    def sample_local(logits: torch.Tensor, *rest: Any) -> Any:
        held.append(torch.empty(1 << 20, dtype=torch.int8, device=logits.device))
        return whole_local(logits, *rest)

    runner.model.ops.sample_local = sample_local  # type: ignore[method-assign]


def refused_cast(runner: Runner) -> None:
    """A detour through bf16."""
    whole = runner.model.ops.linear
    runner.model.ops.linear = lambda x, weight: whole(x.bfloat16().half(), weight)  # type: ignore


def expert_ids(past: int) -> Callable[[Runner], None]:
    """The last ids of each bank, `past` further: 1 is the sentinel of other engines.

    The contract looks at them on the host, since nothing is computed on the chip.
    """

    def seed(runner: Runner) -> None:
        whole, contract = runner.model.ops.moe_experts, CONTRACTS["moe_experts"]

        def moe_experts(x: Any, weights: Any, local: Any, gate_up: Any, down: Any) -> Any:
            stop = len(gate_up) + past
            ids = torch.arange(stop - local.shape[-1], stop, device="cpu").expand(local.shape)
            arguments = {"x": x, "weights": weights, "local": ids}
            contract.check("moe_experts", {**arguments, "gate_up": gate_up, "down": down})
            return whole(x, weights, ids.to(x.device), gate_up, down)

        runner.model.ops.moe_experts = moe_experts  # type: ignore[method-assign]

    return seed


def other_order(runner: Runner) -> None:
    """On rank 1 the first sum of a step comes after the first gather."""
    comm, late = runner.comm, list[torch.Tensor]()
    add, gather, rest = comm.all_reduce_, comm.all_gather, iter([True])

    def all_reduce_(x: torch.Tensor) -> torch.Tensor:
        if not next(rest, False):
            return add(x)
        late.append(x)
        return x

    def all_gather(x: torch.Tensor) -> torch.Tensor:
        parts = gather(x)
        while late:
            add(late.pop())
        return parts

    if comm.rank == 1:
        vars(comm).update(all_reduce_=all_reduce_, all_gather=all_gather)


def lost_recording(runner: Runner) -> None:
    """Rank 1 failed to record a graph, behind the first of its collectives."""
    comm = runner.comm
    if comm.rank == 1:
        with comm.recording():
            comm.all_gather(runner.builder.last_tokens)


FAULTS: dict[str, Callable[[Runner], None]] = {
    "host_read": host_read,
    "fresh_tensor": fresh_tensor,
    "refused_cast": refused_cast,
}
REFUSED: dict[str, Callable[[Runner], None]] = {
    "nothing": lambda _: None,
    "last_expert": expert_ids(0),
    "sentinel_expert": expert_ids(1),
    "lost_recording": lost_recording,
    "other_order": other_order,
}


def sampled_flags(options: Options) -> RowFlag:
    return RowFlag.SAMPLE | (RowFlag.ENTER | RowFlag.PROPOSE if options.mtp else RowFlag.NONE)


def prefill(options: Options) -> StepPlan:
    count, flags = options.prompt_tokens, RowFlag.PREFILL | sampled_flags(options)
    slots = range(options.sequences)
    return StepPlan(
        Opcode.STEP, 0, 1, False,
        tuple(Admit(slot, 0.0, 0, 1.0, 0.0, 0, 0) for slot in slots),
        tuple(PageUpdate(slot, 0, slot) for slot in slots),
        tuple(Row(slot, 0, count, flags) for slot in slots),
        tuple(range(100, 100 + count * options.sequences)),
    )  # fmt: skip


def decode(options: Options, step: int) -> StepPlan:
    """A token a sequence, or a token and its drafts, of which none is kept."""
    start, flags = options.prompt_tokens + step, sampled_flags(options)
    flags |= RowFlag.DRAFT if options.mtp else RowFlag.NONE
    slots = range(options.sequences)
    rows = tuple(Row(slot, start, 1 + options.mtp, flags) for slot in slots)
    return StepPlan(Opcode.STEP, 0, step + 2, False, (), (), rows, ())


def run_step(rank: Rank, standin: Standin, plan: StepPlan) -> dict[str, Any]:
    """Executes a plan as the rank's loop does, and tells what it cost."""
    assert rank.runner is not None
    npu = torch.npu  # type: ignore[attr-defined]
    standin.clear_trace()
    before, allocated = standin.counts(), npu.memory_allocated()
    sampled = rank.runner.execute(plan)
    if rank.rank == 0:
        sampled.tolist()
    del sampled
    counts = asdict(standin.counts().since(before))
    kept = npu.memory_allocated() - allocated
    return {"counts": counts, "kept_bytes": kept, "trace": standin.trace()}


def main(index: int, port: int, options: Options) -> dict[str, Any]:
    config = EngineConfig(
        model_dir=str(ROOT / "deploy" / "models" / options.model), ranks=options.ranks,
        device="npu", dtype=options.dtype, context_tokens=options.context_tokens,
        max_sequences=4, chips=4, mtp=options.mtp, page_tokens=PAGE_TOKENS, start_timeout_s=60.0,
        graphs=False, prefix_cache=options.prefix_cache,
        int8_activations=options.int8_activations,
    )  # fmt: skip
    nothing_to_compare()
    rank = Rank(config, index, options.ranks)
    if options.ranks > 1 and index == 0:
        rank._store, port = listen("127.0.0.1", 60.0)
        print(f"port {port}", flush=True)
    rank.open(port)
    global torch_npu
    torch_npu = importlib.import_module("torch_npu")
    npu, standin = torch.npu, Standin()  # type: ignore[attr-defined]
    npu.empty_cache()
    before = npu.memory_allocated()
    rank.load()
    assert rank.runner is not None
    assert rank.plan is not None
    loaded = npu.memory_allocated() - before
    told = {
        "soc": npu.get_device_name(npu.current_device()),
        "config": asdict(config),
        "planned": dict(rank.plan.ranks[index].rows),
        "allocated": loaded,
        **memory(rank),
        "ops": {one.op: one.implementation for one in rank.runner.model.ops.op_info()},
    }
    return told if options.memory_only else {**told, **all_steps(rank, standin, options)}


def all_steps(rank: Rank, standin: Standin, options: Options) -> dict[str, Any]:
    """What a prefill, decode steps, steps with faults and steps by graphs cost."""
    first = run_step(rank, standin, prefill(options))
    steps = [run_step(rank, standin, decode(options, step)) for step in range(options.steps)]
    told: dict[str, Any] = {"prefill": first, "steps": steps}
    if not options.mtp:
        told["faults"] = with_faults(rank, standin, options)
        told["refused_steps"] = with_refused(rank, options)
    return told | with_graphs(rank, standin, options)


def with_graphs(rank: Rank, standin: Standin, options: Options) -> dict[str, Any]:
    """Captures and steps as the chip's limit has it; captures with a limit of three."""
    assert rank.runner is not None
    device, graphs = rank._device, rank.runner.graphs
    assert isinstance(device, NpuDevice)
    assert device.soc is not None
    captures, whole = list[dict[str, int]](), device.capture

    def capture(function: Callable[[], Any]) -> Any:
        def watched() -> Any:
            before = standin.counts()
            result = function()
            captures.append(asdict(standin.counts().since(before)))
            return result

        return whole(watched)

    device.capture = capture  # type: ignore[method-assign]
    rank.runner.record_graphs()
    told = {"captures": list(captures), "refused": graphs.counts.refused}
    first = options.steps + 2 * len(FAULTS) + len(REFUSED)  # after all steps so far
    graph_steps = [
        run_step(rank, standin, decode(options, first + step)) for step in range(options.steps)
    ]
    captures.clear()
    graphs._recorded.clear()
    device.soc = replace(device.soc, max_graphs_in_gang=3)
    rank.runner.record_graphs()
    return {**told, "graph_steps": graph_steps, "captures_of_three": captures}


def memory(rank: Rank) -> dict[str, Any]:
    """Bytes of every storage on the chip, by who holds it; shape and bytes of those in tiles.

    `held` are the runner's, `buffers` those of collectives; `constants` are nobody's of a rank:
    vectors of ones that operators keep.
    """
    tensors = [
        one for one in gc.get_objects() if type(one) is torch.Tensor and one.device.type == "npu"
    ]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    buffers = pointers(rank.comm)
    held = pointers(rank.runner) - buffers
    tiles = {
        one.untyped_storage().data_ptr(): [list(one.shape), one.untyped_storage().nbytes()]
        for one in tensors
        if torch_npu.get_npu_format(one) == FRACTAL_NZ
    }
    return {
        "held": [size for at, size in storages.items() if size and at in held],
        "buffers": [size for at, size in storages.items() if size and at in buffers],
        "constants": [size for at, size in storages.items() if size and at not in held | buffers],
        "tiles": list(tiles.values()),
    }


def pointers(root: Any) -> set[int]:
    """Storages of the chip that an object holds, itself or through others."""
    found, seen, left = set[int](), set[int](), [root]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            if one.device.type == "npu":
                found.add(one.untyped_storage().data_ptr())
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
        else:
            left += getattr(one, "__dict__", {}).values()
    return found


def nothing_to_compare() -> None:
    """No value means anything here: neither the ranks' decisions nor a replay's logits."""
    Runner._check_decisions = lambda *_: None  # type: ignore[method-assign]
    DecodeGraphs.check = lambda *_: ""  # type: ignore[method-assign]
    DecodeGraphs._failed = lambda _, reason, __: bool(reason)  # type: ignore[method-assign]


def with_faults(rank: Rank, standin: Standin, options: Options) -> dict[str, list[Any]]:
    """Two steps with each fault, which is taken out again."""
    assert rank.runner is not None
    told = {}
    for index, (name, seed) in enumerate(FAULTS.items()):
        whole = dict(vars(rank.runner.model.ops))
        seed(rank.runner)
        first = options.steps + 2 * index
        told[name] = [run_step(rank, standin, decode(options, step)) for step in (first, first + 1)]
        vars(rank.runner.model.ops).update(whole)
    return told


def with_refused(rank: Rank, options: Options) -> dict[str, str]:
    """What a rank's loop raised in a step with each seed; empty for nothing."""
    assert rank.runner is not None
    told = {}
    for index, (name, seed) in enumerate(REFUSED.items()):
        ops, comm = vars(rank.runner.model.ops), vars(rank.comm)
        whole = dict(ops)
        seed(rank.runner)
        step = options.steps + 2 * len(FAULTS) + index
        try:
            rank._execute(rank.runner, decode(options, step))
            told[name] = ""
        except RankError as error:
            told[name] = str(error)
        ops.update(whole)
        for patched in ("all_reduce_", "all_gather"):
            comm.pop(patched, None)
    return told


if __name__ == "__main__":
    try:
        told = main(int(sys.argv[1]), int(sys.argv[2]), Options(**json.loads(sys.argv[3])))
    except NrankError as error:
        told = {"error": str(error)}
    Path(sys.argv[4]).write_text(json.dumps(told))
    os._exit(0)
