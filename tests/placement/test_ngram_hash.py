"""Hash constants against the published ones and against those stored in a checkpoint."""

from __future__ import annotations

import struct
from math import isqrt

import pytest

from placement.headers import CheckpointHeaders
from placement.ngram_hash import (
    head_offsets,
    head_vocab_sizes,
    is_prime,
    layer_multipliers,
    splitmix64,
)
from placement.spec import ModelSpec


def test_published_multipliers() -> None:
    assert layer_multipliers(248320, 3, 0, 1234) == (
        23703573157769,
        20109073645365,
        8052911324071,
    )


def test_published_prime_sizes_and_table() -> None:
    sizes = head_vocab_sizes(20_000_000, 16, 0)
    assert sizes[:4] == (20000003, 20000023, 20000033, 20000047)
    assert sizes[-1] == 20000171
    assert sum(sizes) == 320_001_446
    assert head_offsets(sizes)[:3] == (0, 20000003, 40000026)


def test_second_layer_goes_on_where_the_first_ended() -> None:
    both = head_vocab_sizes(1000, 8, 0) + head_vocab_sizes(1000, 8, 1)
    assert list(both) == sorted(set(both))
    assert both == head_vocab_sizes(1000, 16, 0)


def test_splitmix64_reference_vector() -> None:
    # First outputs of the reference generator seeded with 1234567 (rosettacode.org/wiki/
    # Pseudo-random_numbers/Splitmix64).
    golden, outputs = 0x9E3779B97F4A7C15, []
    for i in range(3):
        outputs.append(splitmix64((1234567 + i * golden) % 2**64))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_primality_equals_trial_division() -> None:
    def slow(value: int) -> bool:
        return value > 1 and all(value % d for d in range(2, isqrt(value) + 1))

    assert [v for v in range(3000) if is_prime(v)] == [v for v in range(3000) if slow(v)]


@pytest.mark.parametrize("pseudoprime", [561, 3215031751, 3825123056546413051, 2**61 + 1])
def test_strong_pseudoprimes_are_composite(pseudoprime: int) -> None:
    assert not is_prime(pseudoprime)
    assert is_prime(2**61 - 1)


def test_constants_equal_those_in_the_embedded_checkpoint(
    tiny: tuple[ModelSpec, CheckpointHeaders],
) -> None:
    spec, headers = tiny
    layer = next(layer for layer in spec.layers if layer.ngram is not None)
    ngram = layer.ngram
    assert ngram is not None
    roles = {tensor.role: tensor.pieces[0].name for tensor in spec.tensors}
    for role, wanted in (
        ("multipliers", ngram.multipliers),
        ("vocab_sizes", ngram.head_vocab_sizes),
        ("offsets", ngram.head_offsets),
    ):
        header = headers.tensors[roles[f"layers.{layer.index}.ngram.{role}"]]
        with open(header.file, "rb") as file:
            file.seek(header.offset)
            stored = struct.unpack(f"<{len(wanted)}q", file.read(header.nbytes))
        assert stored == wanted
