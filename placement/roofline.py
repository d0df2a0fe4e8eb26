"""An estimate of one decode step: bytes the busiest rank reads over its bandwidth, and latencies.

One sequence, with its drafts. Launches, arithmetic and the waiting of ranks for each other are not
counted, so a real step takes longer. Every input of the estimate is named in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import comb

from placement.config import EngineConfig, RankShare
from placement.ledger import rank_units
from placement.partition import local_shape
from placement.physical import DTYPE_BYTES, is_lookup, rounded, tensor_bytes
from placement.spec import Axis, Component, LayerSpec, ModelSpec, MoeSpec, TensorSpec
from placement.topology import ChipProfile

EDGE_COLLECTIVES = 2  # the embedding's rows, and the best token of each vocabulary part


@dataclass(frozen=True)
class StepEstimate:
    """One step of one sequence. `bytes_by_class` add up to `bytes_per_step`, busiest rank."""

    bytes_per_step: int
    decode_step_s: float
    bytes_by_class: Mapping[str, int]
    read_s: float
    collective_s: float
    collectives: int
    busiest_experts: float  # expected on the busiest rank of a layer, one token
    mean_experts: float
    inputs: tuple[str, ...] = field(default=())


def expected_busiest(sizes: Sequence[int], top_k: int) -> float:
    """Expected number of chosen experts on the rank with most, `top_k` of all chosen uniformly.

    Exact. P(every rank has at most m) = [x^k] prod_r sum_{j<=m} C(size_r, j) x^j / C(E, k), and
    the mean of a count is the sum of P(count > m). 10 of 512 give 4.18 on 4 ranks, 3.42 on 6.
    """
    coefficients = tuple(
        tuple(float(comb(size, j)) for j in range(top_k + 1)) for size in sorted(sizes)
    )
    return _expected_max(coefficients, top_k)


def expected_busiest_by_counts(
    owned: Sequence[Sequence[int]], counts: Sequence[float], top_k: int
) -> float:
    """The same for experts that are chosen as often as `counts` say.

    Conditional Bernoulli sampling: expert e has odds p / (1 - p) with p = top_k * count / total,
    at most 0.95, and exactly `top_k` are chosen. C(size, j) becomes the j-th elementary symmetric
    sum of the rank's odds. Holders of a replicated expert share its odds.
    """
    total = sum(counts)
    if not total:
        return expected_busiest([len(ids) for ids in owned], top_k)
    copies: dict[int, int] = {}
    for ids in owned:
        for expert in ids:
            copies[expert] = copies.get(expert, 0) + 1
    sums = []
    for ids in owned:
        chances = (min(0.95, top_k * counts[e] / total) / copies[e] for e in ids)
        sums.append(_symmetric_sums([p / (1 - p) for p in chances], top_k))
    return _expected_max(tuple(sums), top_k)


def _symmetric_sums(odds: Sequence[float], top: int) -> tuple[float, ...]:
    sums = [1.0] + [0.0] * top
    for one in odds:
        for j in range(top, 0, -1):
            sums[j] += one * sums[j - 1]
    return tuple(sums)


@lru_cache(maxsize=256)
def _expected_max(coefficients: tuple[tuple[float, ...], ...], top_k: int) -> float:
    total = _ways(coefficients, top_k, top_k)
    if not total:  # fewer experts have a chance than are chosen
        return float(top_k)
    return sum(1 - _ways(coefficients, top_k, m) / total for m in range(top_k))


def _ways(coefficients: Sequence[Sequence[float]], top_k: int, most: int) -> float:
    """Coefficient of x^top_k in the product of the polynomials cut after x^most."""
    product = [1.0] + [0.0] * top_k
    for row in coefficients:
        product = [
            sum(product[k - j] * row[j] for j in range(min(k, most) + 1)) for k in range(top_k + 1)
        ]
    return product[top_k]


def distinct_experts(num_experts: int, top_k: int, rows: int) -> float:
    """Expected distinct experts of `rows` independent uniform tokens: 3 rows of 10/512: 29.4."""
    return num_experts * (1 - (1 - top_k / num_experts) ** rows)


def estimate_decode_step(
    config: EngineConfig,
    spec: ModelSpec,
    shares: Sequence[RankShare],
    profile: ChipProfile,
    counts: Sequence[Sequence[float]] = (),
) -> StepEstimate:
    """Every rank reads its dense weights whole, and the experts expected on the busiest one."""
    rows = 1 + config.mtp
    routed = _routed_bytes(config, spec, shares, profile, counts, rows)
    by_rank = [_rank_bytes(config, spec, share, profile) for share in shares]
    worst = max(by_rank, key=lambda classes: sum(classes.values()))
    classes = {"routed_experts": routed, **worst}
    total = sum(classes.values())
    passes = len(spec.layers) + config.mtp * len(spec.draft_layers)
    collectives = 0
    if len(shares) > 1:
        collectives = 2 * passes + EDGE_COLLECTIVES * rows
    read_s = total / profile.bandwidth_bytes_per_s
    collective_s = collectives * profile.collective_latency_s
    busiest, mean = _busiest(spec, shares, counts)
    return StepEstimate(
        bytes_per_step=total,
        decode_step_s=read_s + collective_s,
        bytes_by_class=classes,
        read_s=read_s,
        collective_s=collective_s,
        collectives=collectives,
        busiest_experts=busiest,
        mean_experts=mean,
        inputs=_inputs(config, spec, profile, collectives, bool(counts)),
    )


def _inputs(
    config: EngineConfig, spec: ModelSpec, profile: ChipProfile, collectives: int, counted: bool
) -> tuple[str, ...]:
    context = config.context_tokens or spec.max_context
    routing = "the routing counts" if counted else "uniform routing"
    return (
        f"one sequence at {context} tokens of context, {1 + config.mtp} rows a step",
        f"{profile.bandwidth_bytes_per_s / 1e9:.4g} GB/s a chip, all of it reached",
        f"{collectives} collectives; {profile.latency_source}",
        f"experts of the busiest rank by {routing}; layers' busiest ranks wait for each other",
        "no launches, no arithmetic, no waiting for late ranks: a real step takes longer",
    )


def _first_moe(spec: ModelSpec) -> tuple[int, MoeSpec]:
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.channel, MoeSpec):
            return index, layer.channel
    raise AssertionError("a model without experts has no rank count")


def _busiest(
    spec: ModelSpec, shares: Sequence[RankShare], counts: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Experts of one token on the busiest rank and on average, mean over the layers."""
    found = []
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.channel, MoeSpec):
            found.append(_layer_busiest(index, layer.channel, shares, counts, layer.channel.top_k))
    return sum(found) / len(found), _first_moe(spec)[1].top_k / len(shares)


def _layer_busiest(
    index: int,
    moe: MoeSpec,
    shares: Sequence[RankShare],
    counts: Sequence[Sequence[float]],
    chosen: int,
) -> float:
    owned = [share.experts[index] for share in shares]
    layer_counts = counts[index] if index < len(counts) else ()
    chosen = min(chosen, moe.num_experts)
    copies = sum(map(len, owned)) > moe.num_experts
    if layer_counts or copies:
        even = layer_counts or [1.0] * moe.num_experts
        return expected_busiest_by_counts(owned, even, chosen)
    return expected_busiest([len(ids) for ids in owned], chosen)


def _routed_bytes(
    config: EngineConfig,
    spec: ModelSpec,
    shares: Sequence[RankShare],
    profile: ChipProfile,
    counts: Sequence[Sequence[float]],
    rows: int,
) -> int:
    """Expert bytes on the busiest rank of each layer, summed over the layers."""
    one = expert_bytes(config, spec, profile)
    total = 0.0
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.channel, MoeSpec):
            moe = layer.channel
            chosen = round(distinct_experts(moe.num_experts, moe.top_k, rows))
            total += one[index] * _layer_busiest(index, moe, shares, counts, chosen)
    return round(total)


def expert_bytes(config: EngineConfig, spec: ModelSpec, profile: ChipProfile) -> list[int]:
    """What one expert with its scales adds to a rank at most, a layer, draft layers last."""
    sizes = [0] * (len(spec.layers) + len(spec.draft_layers))
    item = DTYPE_BYTES[config.dtype]
    for tensor in (*spec.tensors, *spec.draft_tensors):
        if tensor.expert_layer >= 0 and _is_expert_bank(tensor):
            size = tensor_bytes(tensor, (1, *tensor.shape[1:]), item, profile)
            added = rounded(size.payload, profile) + rounded(size.scales, profile)
            sizes[tensor.expert_layer] += added
    return sizes


def _is_expert_bank(tensor: TensorSpec) -> bool:
    return any(segment.axis is Axis.EXPERTS for segment in tensor.split.segments)


def _rank_bytes(
    config: EngineConfig, spec: ModelSpec, share: RankShare, profile: ChipProfile
) -> dict[str, int]:
    """Bytes that one rank reads in a step besides routed experts, by class."""
    item, drafts = DTYPE_BYTES[config.dtype], config.mtp
    classes: dict[str, int] = {}
    for tensor in (*spec.tensors, *(spec.draft_tensors if drafts else ())):
        if is_lookup(tensor) or (_is_expert_bank(tensor) and tensor.component is not Component.MTP):
            continue
        size = tensor_bytes(tensor, local_shape(tensor, share), item, profile)
        nbytes = size.payload + size.scales
        if tensor.component is Component.MTP:
            nbytes *= drafts
            if _is_expert_bank(tensor):
                moe = spec.draft_layers[tensor.expert_layer - len(spec.layers)].moe
                nbytes = nbytes * moe.top_k // moe.num_experts
        elif tensor.component is Component.EMBEDDING:
            nbytes *= 1 + drafts  # the output head is read again for each draft
        classes[tensor.component.value] = classes.get(tensor.component.value, 0) + nbytes
    for layer in spec.layers:
        for name, nbytes in _state_reads(config, spec, layer, share).items():
            classes[name] = classes.get(name, 0) + nbytes
    return {name: nbytes for name, nbytes in classes.items() if nbytes}


def _state_reads(
    config: EngineConfig, spec: ModelSpec, layer: LayerSpec, share: RankShare
) -> dict[str, int]:
    """Cache and state of one sequence: selected K/V, all index keys, states read and written.

    Drafts read a state once more: first to verify, then to replay what stays.
    """
    units, item = rank_units(share), DTYPE_BYTES[config.dtype]
    context = config.context_tokens or spec.max_context
    slot = layer.mixer.slot_bytes(units, item)
    page = layer.mixer.page_bytes(units, config.page_tokens, item)
    budget = getattr(layer.mixer, "budget_tokens", context)
    return {
        "kv_pages": page.kv * min(context, budget) // config.page_tokens,
        "index_pages": page.index * context // config.page_tokens,
        "recurrent_slots": (3 if config.mtp else 2) * slot.recurrent,
    }
