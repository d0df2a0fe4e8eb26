"""Perplexity of the embedded model in every format, beside bf16: prints the table of the docs.

Usage: python -m tests.deploy.quantize.perplexity [FOLDER]

Each row is made by `nrank quantize` (kept in FOLDER, else in a temporary one) and run by the engine
in float32 on one CPU rank, so the packed operators count, not the values that they stand for. Held
text, which is in no training data: tests/golden/prompt.txt and docs/architecture.md as it is now.
Beside it stand texts of the certification's generator (sentences drawn from a seed, as the model
never saw them). Drafts are counted on prose and counting of `nrank bench`.
"""

from __future__ import annotations

import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from cluster.tokens import Tokenizer
from deploy.bench.texts import make_texts
from deploy.bench.workloads import FULL
from deploy.certify.needles import make_prompt
from deploy.defaults import EMBEDDED_MODEL
from deploy.quantize.conversion import Conversion
from deploy.quantize.recipe import Recipe
from placement.config import EngineConfig
from placement.evidence import Asked
from rank_worker.launch import launch_engine
from rank_worker.messages import EngineRequest

ROOT = Path(__file__).parents[3]
HELD = {
    "prose": ROOT / "tests" / "golden" / "prompt.txt",
    "docs": ROOT / "docs" / "architecture.md",
}
PART_TOKENS, MOST_PARTS = 1280, 3
GENERATED = 3
DRAFTS = 2


@dataclass(frozen=True)
class Variant:
    """`experts` and `dense` as for `nrank quantize`; None: the embedded model itself."""

    name: str
    experts: str | None = None
    dense: str | None = None
    int8_activations: bool = False

    def folder(self, kept: Path) -> Path:
        """Made when it isn't there."""
        if self.experts is None:
            return EMBEDDED_MODEL
        out = kept / f"{self.experts}+{self.dense}"
        Conversion(str(EMBEDDED_MODEL), out, Recipe.parse(self.experts, self.dense)).run(
            None, lambda *_: None
        )
        return out


@dataclass(frozen=True)
class Held:
    """Loss of each token in nats by text, and drafts kept of those made."""

    losses: dict[str, list[float]]
    accepted: int
    drafts: int

    def perplexity(self, name: str) -> float:
        return math.exp(mean(self.losses[name]))

    def held(self) -> list[float]:
        return [loss for name in HELD for loss in self.losses[name]]

    def above(self, base: Held) -> tuple[float, float]:
        """How much larger the perplexity of the held text is, and the standard error of that."""
        more = [a - b for a, b in zip(self.held(), base.held(), strict=True)]
        return math.exp(mean(more)) - 1, stdev(more) / len(more) ** 0.5


VARIANTS = (
    Variant("bf16"),
    Variant("experts W8 (w8_sym)", "w8_sym"),
    Variant("experts W8 with zero points (w8)", "w8"),
    Variant("experts W4 g32 (w4g32)", "w4g32"),
    Variant("experts W4 g32 with zero points (w4g32_asym)", "w4g32_asym"),
    Variant("experts W4 in 32 x 32 blocks (w4b32)", "w4b32"),
    Variant("experts NVFP4 (nvfp4)", "nvfp4"),
    Variant("experts MXFP4 (mxfp4)", "mxfp4"),
    Variant("experts FP8 in blocks (fp8)", "fp8"),
    Variant("experts W2 (w2)", "w2"),
    Variant("experts W4 in layers 0-5, W2 behind", "w4b32:0-5,w2:6-8"),
    Variant("all dense W8, experts bf16", "bf16", "w8_sym"),
    Variant("experts W4 g32, all dense W8", "w4g32", "w8_sym"),
    Variant("experts W4 g32, 8-bit activations (W4A8)", "w4g32", None, True),
    Variant("experts W4 g32, all dense W8, 8-bit activations", "w4g32", "w8_sym", True),
)


def held_texts(tokenizer: Tokenizer) -> dict[str, list[tuple[int, ...]]]:
    """Token ids by name of the text, in parts that fit the context."""
    asked = Asked((PART_TOKENS,), (0, 50, 100), 1, 0, "")
    made = [make_prompt(tokenizer, asked, PART_TOKENS, index).ids for index in range(GENERATED)]
    whole = {name: tokenizer.encode(file.read_text()) for name, file in HELD.items()}
    parts = {
        name: [ids[at : at + PART_TOKENS] for at in range(0, len(ids) - 1, PART_TOKENS)]
        for name, ids in whole.items()
    }
    return {name: found[:MOST_PARTS] for name, found in parts.items()} | {"generated": made}


def measure(variant: Variant, kept: Path, texts: dict[str, list[tuple[int, ...]]]) -> Held:
    config = EngineConfig(
        str(variant.folder(kept)), context_tokens=2048, mtp=DRAFTS, prefix_cache=False,
        max_sequences=4, int8_activations=variant.int8_activations, mtp_auto=False,
    )  # fmt: skip
    drafted = [
        EngineRequest(f"{text.name}-{index}", ids, FULL.new, ignore_eos=True)
        for text in make_texts(Tokenizer.load(EMBEDDED_MODEL), FULL)
        if text.name in ("counting", "prose")
        for index, ids in enumerate(text.prompts)
    ]
    losses: dict[str, list[float]] = {}
    with launch_engine(config) as engine:
        for name, parts in texts.items():
            losses[name] = []
            for index, ids in enumerate(parts):
                asked = EngineRequest(f"{name}-{index}", ids, 1, logprobs=0, prompt_logprobs=True)
                (result,) = engine.generate([asked])
                losses[name] += [-one.logprob for one in result.prompt_logprobs]
        answers = engine.generate(drafted)
    accepted = sum(one.accepted_tokens for one in answers)
    return Held(losses, accepted, sum(one.draft_tokens for one in answers))


def main(folder: str | None) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        kept = Path(folder or temporary)
        texts = held_texts(Tokenizer.load(EMBEDDED_MODEL))
        base: Held | None = None
        for variant in VARIANTS:
            held = measure(variant, kept, texts)
            if base is None:
                base = held
                print(", ".join(f"{name}: {len(found)}" for name, found in held.losses.items()))
                print(f"| weights | {' | '.join(texts)} | held text against bf16 | drafts kept |")
                print("|---|" + "---|" * (len(texts) + 2))
            cells = " | ".join(f"{held.perplexity(name):.2f}" for name in texts)
            more, error = held.above(base)
            change = f"{100 * more:+.2f} ± {100 * error:.2f} %" if held is not base else ""
            drafts = f"{held.accepted / held.drafts:.2f} of {held.drafts}"
            print(f"| {variant.name} | {cells} | {change} | {drafts} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
