"""From `--base` and `--against` to two configurations, and the workloads that both are run on.

Fields, types and bounds are those of the server's configuration that reach a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches

from deploy.bench.against import Rounds
from deploy.bench.texts import draft_workloads
from deploy.bench.workloads import CONCURRENCIES, Sizes, Workload, random_prompt, usable_ids
from deploy.config import load_config
from deploy.flags import refuse_missing_features
from deploy.prompts import ModelLimits
from placement.config import EngineConfig
from placement.errors import ConfigError
from placement.prepare import prepare

TEXTS = ("counting-", "prose-")  # whose drafts are mostly kept, and half of them
EXPERT_ROWS = ("routed_experts", "scales")
STREAMS = 1000  # random ids of a workload begin at a multiple of this


@dataclass(frozen=True)
class Sides:
    """Two configurations that fit."""

    a: EngineConfig
    b: EngineConfig

    @property
    def differences(self) -> dict[str, tuple[object, object]]:
        a, b = asdict(self.a), asdict(self.b)
        return {name: (a[name], b[name]) for name in a if a[name] != b[name]}

    def value(self, side: int, field: str) -> object:
        """Of A (0) or B (1); what a default stands for where that is another number."""
        config = (self.a, self.b)[side]
        if field == "context_tokens" and not config.context_tokens:
            return prepare(config).plan.context.configured_tokens
        return getattr(config, field)

    @property
    def has_same_ids(self) -> bool:
        """Whether both have to make the same greedy ids: same weights and inputs, in one type."""
        return not {"dtype", "model_dir", "int8_activations"} & self.differences.keys()

    def expert_bytes(self) -> list[int] | None:
        """What routed experts and scales take in the memory of all ranks; None for one model."""
        if self.a.model_dir == self.b.model_dir:
            return None
        plans = [prepare(config).plan for config in (self.a, self.b)]
        return [
            sum(dict(rank.rows).get(row, 0) for rank in plan.ranks for row in EXPERT_ROWS)
            for plan in plans
        ]

    def limits(self) -> ModelLimits:
        """With the context that both sides have. ConfigError for two vocabularies."""
        both = [ModelLimits.read(config) for config in (self.a, self.b)]
        if both[0].vocab != both[1].vocab:
            raise ConfigError(
                f"--against model: vocabularies of {both[0].vocab} and {both[1].vocab} tokens "
                "can't be asked the same; give the same model in another format"
            )
        return min(both, key=lambda one: one.context_tokens)


def make_sides(model_dir: str, ranks: int, base: str, against: str) -> Sides:
    """A is what the server runs a model with, in float32 and with `base` changed; B is A with
    `against` changed. ConfigError, or PlanError when one doesn't fit.
    """
    ours = {"model": model_dir, "ranks": str(ranks), "dtype": "float32", **parse("--base", base)}
    a = _engine("--base", ours)
    b = _engine("--against", {**ours, **parse("--against", against)})
    for config in (a, b):
        refuse_missing_features(config)
        prepare(config)
    return Sides(a, b)


def parse(flag: str, text: str) -> dict[str, str]:
    """FIELD=VALUE,... as it stands; ConfigError for an unknown field, naming the closest."""
    names = [field.name for field in fields(EngineConfig)]
    known = ["model" if name == "model_dir" else name for name in names]
    found: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"{flag}: {part!r} has to be FIELD=VALUE, for example mtp=0")
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{flag}: unknown field {name!r}; {hint}")
        if name in found:
            raise ConfigError(f"{flag}: {name} is given twice; leave one out")
        found[name] = value
    return found


def _engine(flag: str, values: dict[str, str]) -> EngineConfig:
    try:
        return load_config(overrides=values).engine()
    except ConfigError as error:
        raise ConfigError(f"{flag}: {str(error).removeprefix('flags: ')}; correct it") from error


def make_rounds(limits: ModelLimits, sizes: Sizes, repeats: int) -> tuple[list[Rounds], list[str]]:
    """Random ids that no round has seen before; then texts, alike in all rounds, for drafts."""
    usable = usable_ids(limits.vocab, limits.end_token_ids)
    p, n = sizes.prompt, sizes.new
    asked = [(f"decode-{c}x{p}+{n}", c, p, n) for c in CONCURRENCIES]
    asked += [(f"prefill-{length}", 1, length, 1) for length in sizes.prefills]
    rounds = [
        Rounds([_random(usable, STREAMS * place, turn, *what) for turn in range(1 + repeats)])
        for place, what in enumerate(asked, 1)
    ]
    prefix = (f"prefix-{sizes.prefix}", 1, sizes.prefix, n)
    first = STREAMS * (len(asked) + 1)
    turns = [_random(usable, first, turn, *prefix) for turn in range(1 + repeats)]
    rounds.append(Rounds(turns, has_again=True))
    texts, left_out = draft_workloads(limits, usable, sizes)
    rounds += [Rounds([w] * (1 + repeats)) for w in texts if w.id.startswith(TEXTS)]
    return _within(rounds, left_out, limits.context_tokens)


def _random(
    usable: Sequence[int], first: int, turn: int, name: str, count: int, length: int, new: int
) -> Workload:
    begin = first + turn * count
    prompts = (random_prompt(usable, index, length) for index in range(begin, begin + count))
    return Workload(name, tuple(prompts), new)


def _within(
    rounds: Sequence[Rounds], left_out: Sequence[str], context_tokens: int
) -> tuple[list[Rounds], list[str]]:
    """Those that fit into a context, and a line for each of the others."""
    fitting, lines = list[Rounds](), list(left_out)
    for one in rounds:
        needed = one.workloads[0].context_tokens
        if needed <= context_tokens:
            fitting.append(one)
        else:
            lines.append(
                f"{one.id}: needs a context of {needed} tokens, both sides have {context_tokens}"
            )
    return fitting, lines
