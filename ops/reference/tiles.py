"""How many sequences and queries are computed at once, so that memory stays bounded."""

from __future__ import annotations

from placement.spec import TILE_ELEMENTS


def tile_shape(
    batch: int, queries: int, sequence_elements: int, query_elements: int
) -> tuple[int, int]:
    """(sequences, queries) of one tile, each at least 1, from the elements each of them needs."""
    sequences = TILE_ELEMENTS // max(1, sequence_elements + query_elements)
    sequences = max(1, min(batch, sequences))
    at_once = TILE_ELEMENTS // max(1, sequences * query_elements)
    return sequences, max(1, min(queries, at_once))
