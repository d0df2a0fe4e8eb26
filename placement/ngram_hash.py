"""Constants of a hashed n-gram embedding: multipliers, prime table sizes, offsets.

Pure arithmetic, the same on every rank. Formulas follow transformers' `qwen4_exp` model:
splitmix64 (Steele, Lea, Flood 2014) of a seed for the multipliers, consecutive primes for heads.
"""

from __future__ import annotations

from itertools import accumulate, count

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
SEED_STRIDE = 10007  # between the seeds of two layers with an n-gram embedding
# Deterministic Miller-Rabin below 3.3e24 (Sorenson and Webster 2015), so exact for 64 bits.
WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def splitmix64(value: int) -> int:
    """One output of the splitmix64 generator whose state before the call is `value`."""
    value = (value + GOLDEN) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def layer_multipliers(vocab: int, ngram_size: int, ordinal: int, seed: int) -> tuple[int, ...]:
    """Odd multipliers, one a position, small enough that token * multiplier stays in int64.

    `ordinal` counts the layers that have an n-gram embedding, from 0.
    """
    half = max(1, ((1 << 63) - 1) // vocab // 2)
    base = seed + SEED_STRIDE * ordinal
    mixed = (splitmix64((base + GOLDEN * (i + 1)) & MASK64) for i in range(ngram_size))
    return tuple(2 * (value % half) + 1 for value in mixed)


def is_prime(value: int) -> bool:
    if value < 2:
        return False
    for prime in WITNESSES:
        if value % prime == 0:
            return value == prime
    odd, shift = value - 1, 0
    while odd % 2 == 0:
        odd, shift = odd // 2, shift + 1
    return all(_passes(value, witness, odd, shift) for witness in WITNESSES)


def _passes(value: int, witness: int, odd: int, shift: int) -> bool:
    power = pow(witness, odd, value)
    if power in (1, value - 1):
        return True
    for _ in range(shift - 1):
        power = power * power % value
        if power == value - 1:
            return True
    return False


def head_vocab_sizes(base: int, heads: int, ordinal: int) -> tuple[int, ...]:
    """`heads` consecutive primes from `base` on, after those of the `ordinal` layers before."""
    primes = (value for value in count(base) if is_prime(value))
    taken = [next(primes) for _ in range((ordinal + 1) * heads)]
    return tuple(taken[ordinal * heads :])


def head_offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """First table row of each head: the running sum of the sizes before it."""
    return tuple(accumulate(sizes[:-1], initial=0))
