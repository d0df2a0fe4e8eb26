"""How far a score can be trusted: the interval of one, the difference of two. Pure arithmetic."""

from __future__ import annotations

from math import comb, sqrt

Z_95 = 1.959963984540054  # two-sided 95 % of the normal distribution


def wilson(correct: int, count: int) -> tuple[float, float]:
    """Ends of Wilson's 95 % interval of a share, 0..1; (0, 1) without any.

    Wilson 1927: the shares p with |share - p| <= z sqrt(p (1 - p) / n).
    """
    if count == 0:
        return 0.0, 1.0
    share, spread = correct / count, Z_95 * Z_95 / count
    middle = share + spread / 2
    half = Z_95 * sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p that two systems are equally good, from the questions where one is right.

    McNemar 1947, exact form: the pairs where both or neither are right say nothing; the others
    fall on either side like a fair coin.
    """
    count = only_first + only_second
    tail = sum(comb(count, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / (1 << count))
