"""Shares of the axes and of the experts: uneven, empty, user-given, refused."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.config import RankShare
from placement.errors import ConfigError
from placement.experts import as_ranges, contiguous_ownership, deal, validate_ownership
from placement.headers import CheckpointHeaders
from placement.partition import local_index_ranges, local_shape, make_shares
from placement.spec import (
    Axis,
    Component,
    GatedDeltaSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    ResidualKind,
    ResidualSpec,
    Segment,
    Split,
    TensorSpec,
)

Loaded = tuple[ModelSpec, CheckpointHeaders]
SHARED_AXES = (Axis.KEY_HEADS, Axis.KV_HEADS)  # two ranks may hold one unit


@pytest.mark.parametrize(
    ("units", "ranks", "sizes"),
    [
        (512, 6, [86, 86, 85, 85, 85, 85]),
        (14, 4, [4, 4, 3, 3]),
        (14, 6, [3, 3, 2, 2, 2, 2]),
        (12, 14, [1] * 12 + [0, 0]),
        (5, 1, [5]),
    ],
)
def test_units_are_dealt_in_order(units: int, ranks: int, sizes: list[int]) -> None:
    ranges = deal(units, ranks)
    assert [stop - start for start, stop in ranges] == sizes
    assert [u for start, stop in ranges for u in range(start, stop)] == list(range(units))
    assert all(span == (0, 0) for span, size in zip(ranges, sizes, strict=True) if size == 0)


@pytest.mark.parametrize("ranks", [0, -1, 15])
def test_rank_count_outside_one_to_experts(tiny: Loaded, ranks: int) -> None:
    with pytest.raises(ConfigError, match=rf"ranks = {ranks}.*14 experts"):
        make_shares(tiny[0], ranks)


@pytest.mark.parametrize(
    ("owned", "words"),
    [
        (((0, 1), (1, 2, 3)), ["duplicate 1"]),
        (((0,), (2, 3)), ["missing 1"]),
        (((0, 1), (2, 3, 4, -1)), ["out of range -1, 4"]),
        (((0, 0, 9), (3,)), ["out of range 9", "duplicate 0", "missing 1, 2"]),
        (((0, 1, 2, 3),), ["names 1 ranks", "there are 2"]),
    ],
)
def test_impossible_ownership_is_refused_with_the_list(
    owned: tuple[tuple[int, ...], ...], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_ownership(owned, num_experts=4, ranks=2, layer=7)
    for word in ("layer 7", *words):
        assert word in str(caught.value)


def test_user_ownership_is_sorted_and_cut_accordingly(tiny: Loaded) -> None:
    spec, _ = tiny
    odd = [e for e in range(13, -1, -1) if e % 2]
    even = [e for e in range(14) if e % 2 == 0]
    shares = make_shares(spec, 2, [[odd, even]])
    assert shares[0].experts[0] == (1, 3, 5, 7, 9, 11, 13)
    assert shares[0].experts[1] == tuple(range(7))  # layers that aren't given stay contiguous
    experts = next(t for t in spec.tensors if t.role == "layers.0.channel.experts_down")
    assert local_index_ranges(experts, shares[0]) == tuple((e, e + 1) for e in sorted(odd))
    assert local_shape(experts, shares[1])[0] == 7


def test_every_expert_has_one_rank() -> None:
    for ranks in range(1, 15):
        owned = contiguous_ownership(14, ranks)
        assert sorted(e for ids in owned for e in ids) == list(range(14))
        assert all(ids for ids in owned)


def test_runs_of_ids() -> None:
    assert as_ranges((0, 1, 2, 5, 7, 8)) == ((0, 2), (5, 5), (7, 8))
    assert as_ranges(()) == ()


def test_heads_of_followers_cover_their_leaders(tiny: Loaded) -> None:
    for ranks in range(1, 15):
        for share in make_shares(tiny[0], ranks):
            for leader, follower, group in (
                ("value_heads", "key_heads", 3),
                ("query_heads", "kv_heads", 6),
            ):
                first, last = share.ranges[leader]
                needed = sorted({head // group for head in range(first, last)})
                assert list(range(*share.ranges[follower])) == needed


def test_key_heads_at_six_ranks_in_the_real_geometry(real: Loaded) -> None:
    shares = make_shares(real[0], 6)
    assert [share.ranges["value_heads"] for share in shares][1] == (8, 16)
    assert [share.ranges["key_heads"] for share in shares] == [
        (0, 3), (2, 6), (5, 8), (8, 11), (10, 14), (13, 16),
    ]  # fmt: skip
    assert [share.ranges["kv_heads"] for share in shares] == [(0, 1)] * 3 + [(1, 2)] * 3


def test_qkv_rows_are_taken_from_each_segment(tiny: Loaded) -> None:
    spec, _ = tiny
    qkv = next(t for t in spec.tensors if t.role == "layers.0.mixer.qkv")
    share = make_shares(spec, 4)[1]  # value heads 3..5, key head 1; all heads are 32 wide
    assert local_index_ranges(qkv, share) == ((32, 64), (160, 192), (352, 448))
    assert local_shape(qkv, share) == (160, 192)


def test_a_rank_without_heads_has_empty_tensors(tiny: Loaded) -> None:
    spec, _ = tiny
    last = make_shares(spec, 14)[-1]
    shapes = {t.role: local_shape(t, last) for t in spec.tensors}
    assert last.ranges["value_heads"] == last.ranges["kv_heads"] == (0, 0)
    assert shapes["layers.0.mixer.qkv"] == (0, 192)
    assert shapes["layers.0.mixer.out"] == (192, 0)
    assert shapes["layers.3.mixer.k"] == (0, 192)
    assert shapes["layers.0.channel.experts_down"] == (1, 192, 64)
    assert shapes["layers.0.channel.router"] == (14, 192)


def owners(tensor: TensorSpec, shares: tuple[RankShare, ...]) -> Counter[int]:
    """Position along the split dimension -> number of ranks that hold it."""
    held: Counter[int] = Counter()
    for share in shares:
        for start, stop in local_index_ranges(tensor, share):
            held.update(range(start, stop))
    return held


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 14])
def test_every_position_is_owned(tiny: Loaded, ranks: int) -> None:
    spec, _ = tiny
    shares = make_shares(spec, ranks)
    for tensor in (*spec.tensors, *spec.draft_tensors):
        held = owners(tensor, shares)
        assert set(held) == set(range(tensor.shape[tensor.split.dim])), tensor.role
        axes = {segment.axis for segment in tensor.split.segments}
        if not axes:
            assert set(held.values()) == {ranks}, tensor.role
        elif not axes & set(SHARED_AXES):
            assert set(held.values()) == {1}, tensor.role


def test_real_geometry_covers_everything_once(real: Loaded) -> None:
    spec, _ = real
    shares = make_shares(spec, 6)
    assert [len(share.experts[0]) for share in shares] == [86, 86, 85, 85, 85, 85]
    for tensor in (*spec.tensors, *spec.draft_tensors):
        axes = {segment.axis for segment in tensor.split.segments}
        whole = tensor.shape[tensor.split.dim]
        ranges = [span for share in shares for span in local_index_ranges(tensor, share)]
        if axes and not axes & set(SHARED_AXES):
            ends = [0, *(stop for _, stop in ranges)]
            assert [start for start, _ in ranges] == ends[:-1], tensor.role
            assert ends[-1] == whole, tensor.role
        total = sum(prod(local_shape(tensor, share)) for share in shares)
        assert total >= prod(tensor.shape), tensor.role


@given(st.integers(0, 600), st.integers(1, 64))
def test_units_are_dealt_once_and_evenly(units: int, ranks: int) -> None:
    ranges = deal(units, ranks)
    assert [u for start, stop in ranges for u in range(start, stop)] == list(range(units))
    sizes = [stop - start for start, stop in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=40)
@given(
    ranks=st.integers(1, 40),
    group=st.integers(1, 6),
    key_heads=st.integers(1, 8),
    kv_heads=st.integers(1, 4),
    vocab=st.integers(1, 50),
)
def test_any_rank_count_covers_every_unit_by_its_rule(
    ranks: int, group: int, key_heads: int, kv_heads: int, vocab: int
) -> None:
    """Leaders once; followers on exactly the ranks whose leaders need them; experts once."""
    segments = {
        Axis.VALUE_HEADS: key_heads * group, Axis.KEY_HEADS: key_heads,
        Axis.QUERY_HEADS: kv_heads * group, Axis.KV_HEADS: kv_heads,
        Axis.VOCAB: vocab, Axis.EXPERTS: 40,
    }  # fmt: skip
    spec = _spec_of_axes(segments)
    shares = make_shares(spec, ranks)
    for tensor in spec.tensors:
        (segment,) = tensor.split.segments
        held = owners(tensor, shares)
        assert set(held) == set(range(segment.units))
        leader = {Axis.KEY_HEADS: Axis.VALUE_HEADS, Axis.KV_HEADS: Axis.QUERY_HEADS}.get(
            segment.axis
        )
        for unit, times in held.items():
            wanted = 1
            if leader is not None:
                heads = range(unit * group, (unit + 1) * group)
                spans = [range(*share.ranges[leader.value]) for share in shares]
                wanted = sum(any(head in span for head in heads) for span in spans)
            assert times == wanted, (segment.axis, unit)


def _spec_of_axes(segments: dict[Axis, int]) -> ModelSpec:
    """A model of one layer with one vector for each axis."""
    tensors = tuple(
        TensorSpec(
            axis.value, (units,), Split(0, (Segment(axis, 1, units),)), Component.DENSE, (),
            expert_layer=0 if axis is Axis.EXPERTS else -1,
        )
        for axis, units in segments.items()
    )  # fmt: skip
    mixer = GatedDeltaSpec(1, 1, 1, 1, 2, "silu")
    layer = LayerSpec(0, mixer, MoeSpec(segments[Axis.EXPERTS], 1, 1, 1, True))
    return ModelSpec(
        "axes", "test", 1, segments[Axis.VOCAB], 1e-6, 64, "float32",
        ResidualSpec(ResidualKind.GATED_STREAMS, 2, 1), (layer,), tensors, (), (), 0,
    )  # fmt: skip


def test_layers_beyond_the_model_are_refused(tiny: Loaded) -> None:
    layer = [list(range(14))]
    with pytest.raises(ConfigError, match="ownership has 10 layers, tiny-flash-next has 9"):
        make_shares(tiny[0], 1, [layer] * 10)
