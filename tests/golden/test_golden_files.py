"""The golden files belong to the checkpoints in use and say enough to compare with."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NAMES = ["embedded", "random-8", "random-4"]


@pytest.mark.parametrize("name", NAMES)
def test_golden_answers_are_complete_and_agree_with_their_logits(
    golden: Callable[[str], Any], name: str
) -> None:
    for length, case in golden(name).cases.items():
        assert len(case.prompt_ids) == length
        assert len(case.token_ids) == len(case.margins) == 48
        assert case.comparable() > 0
        generated = [p for p in case.logits if length - 1 <= p]
        assert len(generated) == 4
        for position in generated:
            if case.margins[position - length + 1] > 2e-4:
                row = case.logits[position]
                assert int(np.argmax(row)) == case.token_ids[position - length + 1]


@pytest.mark.parametrize("name", NAMES)
def test_close_decisions_are_rarer_than_the_rule_allows(
    golden: Callable[[str], Any], name: str
) -> None:
    margins = np.concatenate([case.margins for case in golden(name).cases.values()])
    assert (margins < 2e-4).sum() <= len(margins) / 2000


def test_embedded_answers_belong_to_the_embedded_weights(
    golden: Callable[[str], Any], embedded_model_dir: Path
) -> None:
    sha = sha256()
    for file in sorted(embedded_model_dir.glob("model*.safetensors")):
        sha.update(file.read_bytes())
    assert sha.hexdigest() == golden("embedded").weights_sha256


def test_a_wrong_id_is_caught(golden: Callable[[str], Any]) -> None:
    case = golden("random-4").cases[64]
    case.check_ids(case.token_ids)
    wrong = list(case.token_ids)
    wrong[case.comparable() - 1] ^= 1
    with pytest.raises(AssertionError):
        case.check_ids(wrong)


def test_layouts_hold_the_same_weights(random_checkpoint: Callable[..., Path]) -> None:
    from safetensors import safe_open

    folders = [
        random_checkpoint(layers=4, experts="split"),
        random_checkpoint(layers=4, experts="fused", prefix="model.language_model."),
    ]
    totals = []
    for folder in folders:
        total = 0.0
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "np") as tensors:
                names = tensors.keys()
                total += sum(float(np.abs(tensors.get_tensor(name)).sum()) for name in names)
        totals.append(total)
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)
    assert random_checkpoint(layers=4, experts="split") is folders[0]
