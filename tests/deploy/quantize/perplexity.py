"""Perplexity of the embedded model in every format, beside bf16: prints the table of the docs.

Usage: python -m tests.deploy.quantize.perplexity [FOLDER]

Each row is made by `nrank quantize` (kept in FOLDER, else in a temporary one) and run by the engine
in float32 on one CPU rank, so the packed operators count, not the values that they stand for. Held
texts: tests/golden/prompt.txt, which is in no training data, and texts of the certification's
generator (sentences of a kind that the model wasn't trained on, drawn from a seed). Drafts are
counted on prose and counting of `nrank bench`.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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

PROSE = Path(__file__).parents[2] / "golden" / "prompt.txt"
GENERATED_TOKENS = 1024  # of each generated text
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
    """Mean loss a token of each text in nats, tokens predicted, and drafts kept of those made."""

    prose: float
    generated: float
    whole: float
    tokens: int
    accepted: int
    drafts: int

    def above(self, base: Held) -> float:
        """How much larger the perplexity of all texts is, as a share."""
        return math.exp(self.whole - base.whole) - 1


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


def held_texts(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The prose, then the generated ones."""
    asked = Asked((GENERATED_TOKENS,), (0, 50, 100), 1, 0, "")
    made = [
        make_prompt(tokenizer, asked, GENERATED_TOKENS, index).ids for index in range(GENERATED)
    ]
    return [tokenizer.encode(PROSE.read_text()), *made]


def measure(variant: Variant, kept: Path, texts: Sequence[tuple[int, ...]]) -> Held:
    model = str(variant.folder(kept))
    config = EngineConfig(
        model, context_tokens=2048, mtp=DRAFTS, prefix_cache=False, max_sequences=4,
        int8_activations=variant.int8_activations, mtp_auto=False,
    )  # fmt: skip
    drafted = [
        EngineRequest(f"{text.name}-{index}", ids, FULL.new, ignore_eos=True)
        for text in make_texts(Tokenizer.load(EMBEDDED_MODEL), FULL)
        if text.name in ("counting", "prose")
        for index, ids in enumerate(text.prompts)
    ]
    with launch_engine(config) as engine:
        scored = [
            engine.generate([EngineRequest(f"t{i}", ids, 1, logprobs=0, prompt_logprobs=True)])[0]
            for i, ids in enumerate(texts)
        ]
        answers = engine.generate(drafted)
    losses = [[-one.logprob for one in result.prompt_logprobs] for result in scored]
    generated = [loss for text in losses[1:] for loss in text]
    every = [*losses[0], *generated]
    return Held(
        _mean(losses[0]), _mean(generated), _mean(every), len(every),
        sum(one.accepted_tokens for one in answers), sum(one.draft_tokens for one in answers),
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def main(folder: str | None) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        kept = Path(folder or temporary)
        texts = held_texts(Tokenizer.load(EMBEDDED_MODEL))
        base: Held | None = None
        for variant in VARIANTS:
            held = measure(variant, kept, texts)
            if base is None:
                base = held
                print(f"{len(texts)} texts, {held.tokens} tokens predicted\n")
                print("| weights | prose | generated | both | against bf16 | drafts kept |")
                print("|---|---|---|---|---|---|")
            perplexities = (math.exp(one) for one in (held.prose, held.generated, held.whole))
            cells = " | ".join(f"{one:.3f}" for one in perplexities)
            drafts = f"{held.accepted / held.drafts:.3f} of {held.drafts}"
            change = f"{100 * held.above(base):+.2f} %" if held is not base else ""
            print(f"| {variant.name} | {cells} | {change} | {drafts} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
