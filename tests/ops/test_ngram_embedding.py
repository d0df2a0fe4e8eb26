"""Hashed n-gram embedding: the end-of-text rule, table shares, and transformers' whole layer."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from transformers.models.qwen4_exp import modeling_qwen4_exp as oracle
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from ops.registry import OpSet

EOS = 511
# Multipliers of the released model (vocabulary 248,320, seed 1234).
REAL_MULTIPLIERS = torch.tensor([23703573157769, 20109073645365, 8052911324071])


def _slow_ids(
    tokens: list[int], t: int, multipliers: list[int], sizes: list[int], offsets: list[int]
) -> list[int]:
    """Rows of token t of a whole sequence, in Python integers."""
    order = len(multipliers)
    context = [tokens[t]]
    for back in range(1, order):
        ended = t - back < 0 or EOS in tokens[t - back : t]
        context.append(EOS if ended else tokens[t - back])
    rows, heads = [], len(sizes) // (order - 1)
    for head, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        mixed = 0
        for token, multiplier in zip(context[: head // heads + 2], multipliers, strict=False):
            mixed ^= token * multiplier
        rows.append(mixed % size + offset)
    return rows


def _history(tokens: list[int], start: int, stop: int, context: int) -> Tensor:
    padded = [EOS] * context + tokens
    return torch.tensor([padded[start : stop + context]])


def test_ids_reset_at_end_of_text_and_at_any_cut(ops: OpSet) -> None:
    tokens = [5, 9, EOS, 7, 8, EOS, EOS, 3, 1, 2, 248319, 4]
    sizes, offsets = [1009, 1013, 1019, 20000003], [0, 1009, 2022, 3041]
    hashing = (REAL_MULTIPLIERS, torch.tensor(sizes), torch.tensor(offsets))
    want = [
        _slow_ids(tokens, t, REAL_MULTIPLIERS.tolist(), sizes, offsets) for t in range(len(tokens))
    ]
    for cuts in ([0, 12], [0, 1, 12], [0, 3, 4, 7, 12], list(range(13))):
        parts = [
            ops.ngram_ids(_history(tokens, a, b, 2), EOS, *hashing)[0]
            for a, b in itertools.pairwise(cuts)
        ]
        assert torch.cat(parts).tolist() == want


def test_rows_of_a_batch_are_independent(ops: OpSet) -> None:
    hashing = (REAL_MULTIPLIERS, torch.tensor([1009, 1013]), torch.tensor([0, 1009]))
    history = torch.randint(0, 512, (3, 8))
    both = ops.ngram_ids(history, EOS, *hashing)
    for row in range(3):
        assert torch.equal(
            both[row : row + 1], ops.ngram_ids(history[row : row + 1], EOS, *hashing)
        )


def test_table_shares_add_up_to_the_table(ops: OpSet) -> None:
    table, ids = torch.randn(50, 6), torch.randint(0, 50, (2, 4, 3))
    total = torch.zeros(2, 4, 3, 6)
    for start, stop in ((0, 20), (20, 20), (20, 49), (49, 50)):
        total += ops.table_rows(table[start:stop], ids, start)
    assert torch.equal(total, table[ids])


def test_foreign_rows_are_zero_even_beside_garbage(ops: OpSet) -> None:
    table = torch.full((4, 3), float("nan"))
    rows = ops.table_rows(table, torch.tensor([0, 99, 9]), 10)
    assert torch.equal(rows, torch.zeros(3, 3))


def _layer(hidden: int) -> tuple[Qwen4ExpTextConfig, oracle.Qwen4ExpTextPLELayer]:
    config = Qwen4ExpTextConfig(
        vocab_size=512, hidden_size=hidden, hc_count=4, ple_layer_ids=[2], ple_embed_dim=64,
        ple_conv_kernel_size=4, ngram_size=3, heads_per_ngram=8, ngram_vocab_size_base=1000,
        make_ngram_vocab_size_divisible_by=128, seed=1234, eos_token_id=EOS,
    )  # fmt: skip
    layer = oracle.Qwen4ExpTextPLELayer(config, 1, 0).requires_grad_(False)
    for name, weight in layer.named_parameters():
        weight.data.normal_(0, 0.3 if "norm" in name or "conv" in name else 1)
    return config, layer


@pytest.mark.parametrize("hidden", [16, 2560])
def test_a_whole_layer_matches_transformers(ops: OpSet, hidden: int) -> None:
    config, layer = _layer(hidden)
    tokens = torch.randint(0, 512, (1, 23))
    tokens[0, [4, 5, 15]] = EOS
    streams = torch.randn(23, 4, hidden)
    want = layer(streams.flatten(1)[None], tokens, None)[0]

    embedding = layer.ple_embedding
    ids = ops.ngram_ids(
        _history(tokens[0].tolist(), 0, 23, 2), EOS, embedding.layer_multipliers,
        embedding.ngram_heads_vocab_sizes, embedding.ngram_heads_offsets,
    )  # fmt: skip
    rows = ops.table_rows(embedding.ngram_embedding.weight, ids, 0)[0].flatten(1)
    scales = [
        ops.unit_offset(norm.weight).view(4, hidden)
        for norm in (layer.norm_key, layer.norm_query, layer.norm_conv)
    ]
    gated, conv_in = ops.ngram_gate(
        rows, streams, layer.key_proj.weight, layer.value_proj.weight, *scales,
        config.rms_norm_eps,
    )  # fmt: skip
    window = torch.zeros(9, 4 * hidden)
    first, window = ops.causal_conv_chunk(conv_in[:5], layer.conv1d.weight[:, 0], window, 3)
    second, _ = ops.causal_conv_chunk(conv_in[5:], layer.conv1d.weight[:, 0], window, 3)
    got = gated.flatten(1) + torch.cat((first, second))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 6e-2), (torch.float16, 1e-2)])
def test_half_gate_stays_close(ops: OpSet, dtype: torch.dtype, tolerance: float) -> None:
    embedding, streams = torch.randn(6, 8), torch.randn(6, 4, 16)
    key, value = torch.randn(64, 8), torch.randn(16, 8)
    scales = [torch.rand(4, 16) + 0.5 for _ in range(3)]
    want, want_conv = ops.ngram_gate(embedding, streams, key, value, *scales, 1e-6)
    half = [x.to(dtype) for x in (embedding, streams, key, value)]
    got, conv_in = ops.ngram_gate(*half, *scales, 1e-6)
    assert got.dtype == conv_in.dtype == dtype
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance * 4)
    torch.testing.assert_close(conv_in.float(), want_conv, rtol=tolerance, atol=tolerance * 4)


def test_released_multipliers_are_those_of_transformers() -> None:
    assert torch.equal(oracle._build_layer_multipliers(248320, 3, 0, 1234), REAL_MULTIPLIERS)
