"""The probe's reference gives transformers' logits, and its measures tell what they should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deploy.probe.blocks import spans
from deploy.probe.findings import Deviation
from deploy.probe.plain_model import PlainModel


@pytest.mark.parametrize(
    ("name", "length"),
    [("embedded", 65), ("random-8", 65), pytest.param("embedded", 1100, marks=pytest.mark.slow)],
)
def test_logits_are_those_of_transformers(
    golden: Callable[[str], Any], embedded_model_dir: Path,
    random_checkpoint: Callable[..., Path], name: str, length: int,
) -> None:  # fmt: skip
    """Sparse selection included: it begins behind 256 tokens, in the random model behind 32."""
    folder = embedded_model_dir if name == "embedded" else random_checkpoint(layers=8)
    case, model = golden(name).cases[length], PlainModel(str(folder))
    ids = torch.tensor(case.prompt_ids + case.token_ids)
    with torch.no_grad():
        streams = model.embed(ids)
        for layer in model.layers():
            streams = layer.inject_ngrams(streams, ids)
            streams = layer.mix(streams).into(streams)
            streams = layer.route(streams).into(streams)
        logits = model.logits(streams).numpy()
    for position, expected in case.logits.items():
        assert np.abs(logits[position] - expected).max() < 1e-5 * case.largest_logit


def test_a_deviation_tells_scale_and_direction_and_distrusts_nan() -> None:
    x = torch.tensor([3.0, 4.0])
    assert Deviation.of(2 * x, x) == Deviation(1.0, pytest.approx(1.0))
    assert Deviation.of(torch.tensor([4.0, -3.0]), x).cosine == pytest.approx(0.0)
    assert not Deviation.of(x, x).exceeds(0.0)
    assert Deviation.of(x * float("nan"), x).exceeds(1.0)
    assert Deviation.of(x, torch.zeros(2)).exceeds(1.0)
    assert not Deviation.of(torch.zeros(2), torch.zeros(2)).exceeds(0.0)


def test_numbers_are_told_as_spans() -> None:
    assert spans([7, 0, 1, 2, 5]) == "0-2, 5, 7"
