"""Sampling by Gumbel-max with a counter-based generator, and the check for non-finite logits.

token = argmax over the kept set of logit / T + g(seed, choice, position, token id). The draw
depends on nothing else, so batch, speculation, ranks and backends don't change it. Penalties,
biases and grammar masks are applied to the logits before.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits. Some devices take a shift's number as a copy from the host."""
    return x >> bits if x.is_cpu or x.is_cuda else x // (1 << bits)


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32-bit words of x * factor, x uint32 in int64; no step overflows int64."""
    low = (x & 0xFFFF) * factor
    high = _shifted(x, 16) * factor + _shifted(low, 16)
    return _shifted(high, 16), ((high & 0xFFFF) * 0x10000) | (low & 0xFFFF)


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox 4x32-10 of uint32 words held in int64 tensors that broadcast against each other.

    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC11); the same numbers as
    Random123.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def gumbel(seed: Tensor, choice: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise [B, N] fp32 of seed, choice, position [B] int64 and token_ids [N] or [B, N].

    Counter (token id, position, choice, 0), key the two words of the 64-bit seed, first word of
    the result. With v = (word + 1/2) / 2**32, g = -log(-log(1 - v)): the small v, where fp32 is
    finest, are the large g that decide an argmax. v stays below 1 by a clamp.
    """
    tokens = token_ids if token_ids.dim() == 2 else token_ids[None]
    counter = (
        tokens & _WORD,
        position[:, None] & _WORD,
        choice[:, None] & _WORD,
        torch.zeros_like(position)[:, None],
    )
    key = (seed[:, None] & _WORD, _shifted(seed[:, None], 32) & _WORD)
    word = philox(counter, key)[0]
    v = ((word.float() + 0.5) * 2.0**-32).clamp_max(1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def _kept(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which of scaled [B, V] (logits / T) survive top-k, then min-p, then top-p; bool [B, V].

    top_k 0, min_p 0 and top_p 1 keep all. Among equals the lowest ids come first. Top-p keeps
    the shortest prefix of what the others left that reaches top_p, at least one token.
    """
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    limit = torch.where(top_k > 0, top_k, scaled.shape[1])[:, None]
    keep = (rank < limit) & (ordered >= ordered[:, :1] + min_p.float().log()[:, None])
    mass = torch.softmax(ordered.masked_fill(~keep, float("-inf")), dim=-1)
    before = mass.cumsum(-1) - mass
    keep &= (before < top_p[:, None]) | (top_p[:, None] >= 1) | (rank == 0)
    return torch.zeros_like(keep).scatter_(1, ids, keep)


def _noisy(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
    vocab_start: int,
) -> tuple[Tensor, Tensor]:
    """logits / T and logits / T + g, both [B, V] fp32; without T and g in rows of temperature 0."""
    greedy = (temperature <= 0)[:, None]
    scaled = logits.float() / torch.where(greedy, 1.0, temperature[:, None])
    tokens = torch.arange(logits.shape[1], device=logits.device) + vocab_start
    noise = gumbel(seed, choice, position, tokens).masked_fill(greedy, 0)
    return scaled, scaled + noise


def sample(
    logits: Tensor,  # [B, V]
    temperature: Tensor,  # [B] fp32, 0 is greedy
    top_k: Tensor,  # [B] int64, 0 is off
    top_p: Tensor,  # [B] fp32, 1 is off
    min_p: Tensor,  # [B] fp32, 0 is off
    seed: Tensor,  # [B] int64
    choice: Tensor,  # [B] int64
    position: Tensor,  # [B] int64: absolute index of the sampled token
    vocab_start: int = 0,
) -> Tensor:
    """Token ids [B] int64; ties go to the lowest id. A greedy row ignores the filters."""
    scaled, scores = _noisy(logits, temperature, seed, choice, position, vocab_start)
    keep = _kept(scaled, top_k, top_p, min_p) | (temperature <= 0)[:, None]
    return scores.masked_fill(~keep, float("-inf")).argmax(dim=-1) + vocab_start


def sample_local(
    logits: Tensor,  # [B, Vl]: the vocabulary rows of one rank
    temperature: Tensor,  # [B] fp32
    seed: Tensor,  # [B] int64
    choice: Tensor,  # [B] int64
    position: Tensor,  # [B] int64
    vocab_start: int,
) -> tuple[Tensor, Tensor]:
    """(score [B] fp32, id [B] int64) of a rank's part of the vocabulary, without filters.

    The id of the largest score over ranks (ties: lowest id) is what `sample` gives for the whole.
    A rank without rows gives -inf.
    """
    if logits.shape[1] == 0:
        ids = torch.full_like(seed, vocab_start)
        return torch.full(ids.shape, float("-inf"), device=logits.device), ids
    _, scores = _noisy(logits, temperature, seed, choice, position, vocab_start)
    best = scores.max(dim=-1)
    return best.values, best.indices + vocab_start


def greedy(logits: Tensor) -> Tensor:
    """Ids [B] int64 of the largest logit of each row [B, V]; ties go to the lowest id."""
    return logits.argmax(dim=-1)


def nonfinite_rows(logits: Tensor) -> Tensor:
    """Rows [B] bool of logits [B, V] that hold a NaN or an infinity."""
    return ~torch.isfinite(logits).all(dim=-1)
