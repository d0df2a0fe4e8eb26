"""Sampling: published vectors, the filters against a slow form, splits, and the distribution."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from ops.reference import sampling
from ops.reference.sampling import philox
from ops.registry import OpSet

# Known answers of Random123 for philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def _words(text: str) -> list[Tensor]:
    return [torch.tensor(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS)
def test_philox_gives_the_published_numbers(counter: str, key: str, want: str) -> None:
    assert philox(tuple(_words(counter)), tuple(_words(key))) == tuple(_words(want))


def _philox_slow(counter: list[int], key: list[int]) -> int:
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


def _gumbel_slow(seed: int, choice: int, position: int, token: int) -> float:
    bits = seed & (2**64 - 1)
    word = _philox_slow([token, position, choice, 0], [bits & 0xFFFFFFFF, bits >> 32])
    return -math.log(-math.log1p(-(word + 0.5) / 2**32))


def test_noise_depends_on_seed_choice_position_and_token(ops: OpSet) -> None:
    seed = torch.tensor([0, -1, 2**62 + 12345, -(2**63)])
    choice, position = torch.tensor([0, 3, 1, 0]), torch.tensor([7, 262143, 0, 1])
    tokens = torch.tensor([0, 1, 511, 248319])
    noise = ops.gumbel(seed, choice, position, tokens)
    assert noise.dtype == torch.float32
    for row in range(4):
        want = [
            _gumbel_slow(int(seed[row]), int(choice[row]), int(position[row]), int(token))
            for token in tokens
        ]
        torch.testing.assert_close(noise[row], torch.tensor(want), rtol=1e-5, atol=1e-5)
    assert torch.equal(ops.gumbel(seed, choice, position, tokens.expand(4, 4)), noise)


def test_noise_is_finite_and_of_gumbel_form(ops: OpSet) -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    noise = ops.gumbel(zero + 5, zero, zero, torch.arange(200_000))[0].double()
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    for x in (-1.0, 0.0, 1.0, 4.0):
        share = float((noise <= x).double().mean())
        assert abs(share - math.exp(-math.exp(-x))) < 0.005


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 1])
def test_noise_is_finite_at_the_ends_of_a_word(
    ops: OpSet, monkeypatch: pytest.MonkeyPatch, word: int
) -> None:
    fixed = torch.full((1, 1), word)
    monkeypatch.setattr(sampling, "philox", lambda counter, key: (fixed,) * 4)
    zero = torch.zeros(1, dtype=torch.int64)
    assert ops.gumbel(zero, zero, zero, torch.tensor([0])).isfinite().all()


def _rows(
    n: int, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Tensor, ...]:
    """temperature, top_k, top_p, min_p, seed, choice, position of n rows at positions 0..n-1."""
    return (
        torch.full((n,), temperature), torch.full((n,), top_k), torch.full((n,), top_p),
        torch.full((n,), min_p), torch.full((n,), 99), torch.zeros(n, dtype=torch.int64),
        torch.arange(n),
    )  # fmt: skip


def _slow_sample(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, key: list[int]
) -> int:
    scaled = [x / temperature for x in logits]
    kept = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = kept[: top_k or len(kept)]
    top = scaled[kept[0]]
    kept = [i for i in kept if math.exp(scaled[i] - top) >= min_p]
    total, mass, nucleus = sum(math.exp(scaled[i] - top) for i in kept), 0.0, []
    for i in kept:
        if nucleus and top_p < 1 and mass / total >= top_p:
            break
        nucleus.append(i)
        mass += math.exp(scaled[i] - top)
    return max(sorted(nucleus), key=lambda i: scaled[i] + _gumbel_slow(*key, i))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1), (20, 0.9, 0.05), (1, 0.5, 0.9),
     (500, 0.01, 0.0), (0, 0.0, 0.0)],
)  # fmt: skip
def test_filters_follow_the_slow_form(ops: OpSet, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(40, 61) * 2
    got = ops.sample(logits, *_rows(40, 0.8, top_k, top_p, min_p))
    want = [
        _slow_sample(logits[row].tolist(), 0.8, top_k, top_p, min_p, [99, 0, row])
        for row in range(40)
    ]
    assert got.tolist() == want


def test_top_k_keeps_the_lowest_of_equals(ops: OpSet) -> None:
    got = ops.sample(torch.zeros(300, 50), *_rows(300, 1.0, top_k=3))
    assert sorted(set(got.tolist())) == [0, 1, 2]


def test_temperature_zero_is_the_lowest_argmax(ops: OpSet) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert ops.sample(logits, *_rows(2, 0.0, top_k=1, top_p=0.1)).tolist() == [1, 0]
    assert ops.greedy(logits).tolist() == [1, 0]


def test_greedy_and_sampled_rows_mix(ops: OpSet) -> None:
    logits = torch.randn(6, 40)
    temperature, *rest = _rows(6, 1.0)
    mixed = temperature.clone()
    mixed[[1, 4]] = 0.0
    got, sampled = ops.sample(logits, mixed, *rest), ops.sample(logits, temperature, *rest)
    for row in range(6):
        want = logits[row].argmax() if row in (1, 4) else sampled[row]
        assert got[row] == want


def test_a_row_draws_the_same_alone_and_among_others(ops: OpSet) -> None:
    logits, rows = torch.randn(9, 64), _rows(9, 1.0, top_k=20, top_p=0.95)
    together = ops.sample(logits, *rows)
    for row in range(9):
        alone = ops.sample(logits[row : row + 1], *(x[row : row + 1] for x in rows))
        assert alone[0] == together[row]


def test_draws_follow_the_softmax(ops: OpSet) -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    n = 20_000
    ids = ops.sample(probabilities.log().expand(n, 4), *_rows(n, 1.0))
    share = torch.bincount(ids, minlength=4) / n
    assert float((share - probabilities).abs().max()) < 0.015


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("bounds", [(0, 67), (0, 30, 67), (0, 0, 11, 40, 40, 67, 67)])
def test_split_vocabulary_draws_the_same_token(
    ops: OpSet, temperature: float, bounds: tuple[int, ...]
) -> None:
    logits = torch.randint(-3, 3, (50, 67)).float()  # many exact ties
    rows = _rows(50, temperature)
    parts = [
        ops.sample_local(logits[:, a:b], rows[0], *rows[4:], a)
        for a, b in itertools.pairwise(bounds)
    ]
    scores, ids = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    best = torch.where(scores == scores.amax(0), ids, 1 << 40).amin(0)
    assert torch.equal(best, ops.sample(logits, *rows))


def test_vocabulary_start_shifts_ids_and_noise(ops: OpSet) -> None:
    logits, rows = torch.zeros(20, 30), _rows(20, 1.0)
    padded = torch.full((20, 130), float("-inf"))
    padded[:, 100:] = logits
    assert torch.equal(ops.sample(logits, *rows, 100), ops.sample(padded, *rows))


def test_masked_tokens_are_never_drawn(ops: OpSet) -> None:
    logits = torch.full((200, 32), float("-inf"))
    logits[:, [3, 30]] = 0.0
    ids = ops.sample(logits, *_rows(200, 1.0))
    assert set(ids.tolist()) == {3, 30}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_are_sampled_in_fp32(ops: OpSet, dtype: torch.dtype) -> None:
    logits, rows = torch.randn(12, 64).to(dtype), _rows(12, 0.7, top_k=9)
    assert torch.equal(ops.sample(logits, *rows), ops.sample(logits.float(), *rows))


def test_nonfinite_rows_are_found(ops: OpSet) -> None:
    logits = torch.randn(5, 9)
    logits[1, 8], logits[2, 0], logits[4, 3] = float("nan"), float("inf"), float("-inf")
    assert ops.nonfinite_rows(logits).tolist() == [False, True, True, False, True]
