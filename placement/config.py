"""The engine's resolved configuration: frozen, units in names, passed in whole."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineConfig:
    """What one gang runs with. `deploy/config.py` makes it from YAML and flags."""

    model_dir: str
    ranks: int = 1
    device: str = "cpu"  # cpu | cuda | npu
    dtype: str = "float32"  # float32 | bfloat16 | float16
    context_tokens: int = 0  # 0: the model's own limit
    max_sequences: int = 8
    step_tokens: int = 512  # token budget of one step
    prefill_chunk_tokens: int = 0  # 0: bounded by step_tokens only
    page_tokens: int = 64
    kv_pool_tokens: int = 0  # 0: chosen by the plan
    chips: int = 0  # 0: as many as ranks (cpu) or as the machine has
    chip_profile: str = ""  # "": the device's default
    usable_bytes: int = 0  # of each chip; 0: as the chip profile says
    ownership_file: str = ""  # experts by rank, as `nrank plan --json` writes; "": contiguous
    mtp: int = 0  # draft tokens a step, 0: off
    mtp_auto: bool = True  # a sequence that drafting makes slower stops drafting
    prefix_cache: bool = False  # reuse of prompt prefixes
    prefix_bytes: int = -1  # of each rank for states of prefixes; -1: two a sequence
    prefix_host_bytes: int = -1  # the same in host memory; -1: four times the device's states
    prefix_interval_tokens: int = 512  # a state is kept at least this often
    decode_share: float = 0.55  # of their own rate that running answers keep beside prefill
    check_interval_steps: int = 64  # decisions of all ranks are compared this often
    check_contracts: bool = False  # ops verify ids, slots and shapes before they run
    ops_file: str = ""  # results of operators on this machine, as `nrank doctor --ops` writes
    graphs: bool = True  # decode steps are recorded and replayed, on devices that can
    int8_activations: bool = False  # inputs of products with packed weights in 8 bits
    pin_cpus: bool = False  # each rank's step loop on cores of its own
    comm: str = "auto"  # auto | shm | gloo | nccl | hccl
    load_timeout_s: float = 600.0
    start_timeout_s: float = 120.0
    step_timeout_s: float = 20.0
    master_address: str = "127.0.0.1"


@dataclass(frozen=True)
class RankShare:
    """What one rank owns: a half-open unit range an axis, and the experts of each layer."""

    rank: int
    world_size: int
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)  # Axis value -> (start, stop)
    experts: tuple[tuple[int, ...], ...] = ()  # [layer] -> sorted expert ids
