"""The checkpoint itself: transformers follows its chains, the tokenizers library reads its text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer

from cluster.tokens import Tokenizer
from tests.cluster.scripted.cases import MISSES, SCRIPTS
from tests.golden.scripted_checkpoint import (
    END,
    THINK_OPEN,
    Script,
    ScriptedCheckpoint,
    scripted_checkpoint,
)

GREEDY_TOKENS = 40
MARGIN = 50.0  # logits between the next token and any other


def test_transformers_follows_every_chain(checkpoint: ScriptedCheckpoint) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    misses = checkpoint.chains[MISSES.prompt]
    prompt = torch.tensor([[104, 105, misses[0]]])
    with torch.inference_mode():
        said = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=GREEDY_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        chains = list(checkpoint.chains.values())
        logits = model(torch.tensor([[token for chain in chains for token in chain]])).logits[0]
    expected = [*misses[1:], *[checkpoint.end_id] * GREEDY_TOKENS]
    assert said[0, 3:].tolist() == expected[:GREEDY_TOKENS]
    best = logits.topk(2)
    following = [token for chain in chains for token in (*chain[1:], checkpoint.end_id)]
    assert best.indices[:, 0].tolist() == following
    assert (best.values[:, 0] - best.values[:, 1]).min() > MARGIN


def test_the_library_decodes_ids_to_the_same_text(checkpoint: ScriptedCheckpoint) -> None:
    """Several ids of one text among them."""
    fast = FastTokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(checkpoint.folder)
    for script in SCRIPTS:
        prompt, *ids = checkpoint.chains[script.prompt]
        assert fast.decode(ids) == tokenizer.decode(ids) == script.text()
        assert tokenizer.encode(f"hé{script.prompt}") == (*"hé".encode(), prompt)
        assert fast.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids, False)


@pytest.mark.parametrize(
    ("scripts", "fault"),
    [
        ((Script("<|a|>", (b"x",)), Script("<|a|>", (b"y",))), "one prompt"),
        ((Script("<|a|>", (b"x", b"")),), "without bytes"),
        ((Script("<|a|>", (b"<think>",)),), "is a special token"),
        ((Script("<|a|>", (THINK_OPEN, b"x", THINK_OPEN)),), "has a successor already"),
        ((Script("<|a|>", (THINK_OPEN,)), Script("<|b|>", (THINK_OPEN,))), "successor already"),
        ((Script("<|a|>", (END, b"x")),), "has a successor already"),
    ],
)
def test_what_no_chain_can_say_is_refused(
    tmp_path: Path, scripts: tuple[Script, ...], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        scripted_checkpoint(tmp_path, scripts)
