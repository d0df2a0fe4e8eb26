"""Write what transformers answers in float32, as small files that tests compare with.

Usage: python tests/golden/make_golden.py [NAME ...]

Of each prompt: the greedy ids (end tokens ignored), the margin between the best and the second
logit at each of them, and a few rows of logits. The reference selects experts and blocks with
torch.topk, which leaves the winner among equal values open; here it is replaced by a stable
descending sort, so that the lowest index wins, which is the rule of this project. The incremental
run that gives the ids is checked against one teacher-forced pass over prompt and answer.

A selection whose last chosen and first dropped value are closer than rounding may go either way in
a correct implementation, and changes the logits behind it by more than rounding. Prompts with one
closer than MIN_SELECTION_GAP (relative), or a token closer than MARGIN, are not used: random ones
are drawn again, text is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoint
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parent
EMBEDDED = FOLDER.parents[1] / "deploy" / "models" / "tiny-flash-next"
LENGTHS = (1, 63, 64, 65, 300, 1100)
NEW_TOKENS = 48
MIN_SELECTION_GAP = 1e-6
MARGIN = 2e-4  # below it, two correct float32 implementations may choose differently
NAMES = {"embedded": None, "random-8": 8, "random-4": 4}


selection_gaps: list[float] = []


def stable_topk(x: Tensor, k: int, dim: int = -1) -> Any:
    values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
    if x.shape[dim] > k:
        last, dropped = values.select(dim, k - 1), values.select(dim, k)
        gaps = ((last - dropped) / last)[last > 0]  # equal zeros are equal everywhere
        selection_gaps.append(gaps.min().item() if gaps.numel() else 1.0)
    kept = values.narrow(dim, 0, k), indices.narrow(dim, 0, k)
    return torch.return_types.topk(kept)


@contextmanager
def lowest_index_wins() -> Iterator[None]:
    function, method = torch.topk, Tensor.topk
    torch.topk, Tensor.topk = stable_topk, stable_topk
    try:
        yield
    finally:
        torch.topk, Tensor.topk = function, method


def text_prompts(length: int) -> Iterator[list[int]]:
    ids = AutoTokenizer.from_pretrained(EMBEDDED)((FOLDER / "prompt.txt").read_text()).input_ids
    if len(ids) < max(LENGTHS):
        sys.exit(f"prompt.txt has {len(ids)} tokens, needs {max(LENGTHS)}")
    yield ids[:length]


def random_prompts(length: int) -> Iterator[list[int]]:
    """Any ids, with end tokens inside: they cut the context of the n-gram embedding."""
    generator = torch.Generator().manual_seed(7 + length)
    while True:
        ids = torch.randint(0, tiny_checkpoint.VOCAB, (length,), generator=generator)
        ids[5::97] = tiny_checkpoint.EOS
        yield ids.tolist()


def margins(logits: Tensor) -> Tensor:
    best = logits.sort(dim=-1, descending=True).values
    return best[..., 0] - best[..., 1]


@torch.inference_mode()
def answer(model: Any, prompt: list[int]) -> dict[str, np.ndarray]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    step_logits = torch.stack(out.logits)[:, 0]
    ids = out.sequences[0, len(prompt) :]
    full = model(out.sequences).logits[0]
    again = full[len(prompt) - 1 : -1]
    spread = (again - step_logits).abs().max().item()
    gaps = margins(step_logits)
    if bool(((again.argmax(-1) != ids) & (gaps > MARGIN)).any()):
        sys.exit(f"the reference disagrees with itself at {len(prompt)} tokens by {spread:g}")
    n = len(prompt)
    positions = sorted({0, n // 2, n - 1, n, n + 16, n + NEW_TOKENS - 2})
    print(
        f"  {n:5} tokens: spread {spread:.1e}, smallest margin {gaps.min():.1e}, "
        f"{len(set(ids.tolist()))} different ids"
    )
    return {
        "prompt": np.array(prompt, dtype=np.int32),
        "ids": ids.numpy().astype(np.int32),
        "margins": gaps.numpy(),
        "positions": np.array(positions, dtype=np.int32),
        "largest": full.abs().max().numpy(),
        "logits": full[positions].numpy(),
    }


def file_digest(folder: Path) -> str:
    sha = sha256()
    for file in sorted(folder.glob("model*.safetensors")):
        sha.update(file.read_bytes())
    return sha.hexdigest()


def usable_answer(model: Any, prompts: Iterator[list[int]]) -> dict[str, np.ndarray]:
    """The answer to the first prompt without a selection or a token too close to call."""
    for prompt in prompts:
        selection_gaps.clear()
        arrays = answer(model, prompt)
        closest = min(selection_gaps, default=1.0)
        print(f"        closest selection {closest:.1e}")
        if closest >= MIN_SELECTION_GAP and arrays["margins"].min() >= MARGIN:
            return arrays
    sys.exit(
        "no prompt without a selection or a token that is too close to call: change prompt.txt"
    )


def write_golden(
    name: str, model_dir: Path, digest: str, prompts: Callable[[int], Iterator[list[int]]]
) -> None:
    print(name)
    # Eager experts: the batched variants add a token's experts up in another order.
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    arrays = {}
    with lowest_index_wins():
        for length in LENGTHS:
            for key, array in usable_answer(model, prompts(length)).items():
                arrays[f"{length}/{key}"] = array
    meta = {
        "weights_sha256": digest,
        "lengths": list(LENGTHS),
        "new_tokens": NEW_TOKENS,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    arrays["meta"] = np.array(json.dumps(meta))
    np.savez_compressed(FOLDER / f"{name}.npz", **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    torch.set_num_threads(1)
    for name in parser.parse_args().names or NAMES:
        layers = NAMES[name]
        if layers is None:
            write_golden(name, EMBEDDED, file_digest(EMBEDDED), text_prompts)
            continue
        variant = tiny_checkpoint.Variant(layers=layers)
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_checkpoint.write(variant, Path(folder))
            write_golden(name, path, tiny_checkpoint.digest(variant), random_prompts)


if __name__ == "__main__":
    main()
