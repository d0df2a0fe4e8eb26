"""`nrank check-quality`: the smoke set against a baseline, after a change that may cost quality.

The engine without Ray or HTTP. Quantised weights, another dtype or a new operator run beside the
baseline that the model gave before.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.certify_command import terminated_as_interrupted
from deploy.flags import (
    add_command,
    add_engine_flags,
    add_model_flag,
    add_run_flags,
    engine_config,
    refuse_missing_features,
)
from placement.errors import ConfigError
from placement.whole_file import require_place

if TYPE_CHECKING:
    from deploy.prompts import ModelLimits
    from deploy.quality.baseline_file import Baseline
    from deploy.quality.measured import Measured
    from deploy.quality.smoke_set import SmokeSet
    from deploy.quality.verdict import Part
    from placement.config import EngineConfig

DONE, FAILED = 0, 1
TOLERANCE_NAMES = ("exact", "half", "low-bit")
NO_TOOLS = "the server takes no `tools` yet: calls were read out of the answers' text here"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "check-quality",
        "Run a fixed smoke set (texts, tool calls, choice questions, needles, logits) and compare "
        "with a stored baseline; exits 1 when too much was lost.",
        "nrank check-quality --model /models/my-model-w4 --baseline /models/my-model.json",
    )
    add_model_flag(parser)
    add_engine_flags(parser)
    add_run_flags(parser)
    parser.add_argument(
        "--baseline", metavar="FILE", help="what to compare with (default: the embedded model's)"
    )
    parser.add_argument(
        "--write-baseline", metavar="FILE", help="write what this run answered as a baseline"
    )
    parser.add_argument(
        "--tolerance", choices=TOLERANCE_NAMES,
        help="what may be lost (default: by dtype and formats of both)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from deploy.prompts import ModelLimits
    from deploy.quality.baseline_file import (
        Baseline,
        load_baseline,
        origin_of,
        read_baseline,
        write_baseline,
    )
    from deploy.quality.smoke_set import make_smoke_set
    from deploy.quality.verdict import TOLERANCES, verdict
    from placement.models.registry import load_model_spec
    from placement.prepare import prepare

    config = engine_config(arguments)
    refuse_missing_features(config)
    path, target = baseline_paths(arguments, config.model_dir)
    if path is not None:
        load_baseline(path)  # refused before the tokenizer is loaded; read again with it
    plan = prepare(config).plan  # refused before a process is started
    limits = ModelLimits.read(config)
    tokenizer = limits.tokenizer
    context = plan.context.configured_tokens
    smoke = make_smoke_set(tokenizer, tokenizer.has_template, context)
    origin = origin_of(config, load_model_spec(config.model_dir)[0], smoke)
    base = None if path is None else read_baseline(path, origin, smoke)
    now = Baseline(origin, measured(config, smoke, limits))
    if target is not None:
        write_baseline(target, now)
        print(f"nrank: wrote {target}", file=sys.stderr)
    if base is None:
        print(json.dumps(_counts(now)) if arguments.json else _counts_text(now))
        return DONE
    tolerance = TOLERANCES[arguments.tolerance or origin.tolerance(base.origin)]
    parts = verdict(smoke, now.measured, base.measured, tolerance)
    is_good = all(part.passed is not False for part in parts)
    if arguments.json:
        print(json.dumps(to_json(now, base, tolerance.name, parts, is_good)))
    else:
        print("\n".join(report_lines(now, base, tolerance.name, parts, is_good)))
    return DONE if is_good else FAILED


def baseline_paths(
    arguments: argparse.Namespace, model_dir: str
) -> tuple[Path | None, Path | None]:
    """What to compare with and what to write. ConfigError for neither, or no place to write."""
    from deploy.quality.baseline_file import baseline_path

    path, target = baseline_path(arguments.baseline, model_dir), arguments.write_baseline
    if target is not None:
        require_place("--write-baseline", target)
        return (None if arguments.baseline is None else path), Path(target)
    if path is None:
        raise ConfigError(
            "no baseline to compare with: give --baseline, or make one with --write-baseline"
        )
    return path, None


def measured(config: EngineConfig, smoke: SmokeSet, limits: ModelLimits) -> Measured:
    """Starts a gang, asks, ends the gang. On a terminal the part is shown."""
    from deploy.chip_guard import guard_of
    from deploy.load_display import LoadDisplay
    from deploy.quality.measured import measure
    from deploy.redrawn_line import RedrawnLine
    from rank_worker.launch import launch_engine

    display, line = LoadDisplay(sys.stderr), RedrawnLine(sys.stderr)
    on_progress = display.update if line.redraws else None

    def on_part(part: str) -> None:
        if line.redraws:
            line.draw(f"check-quality: {part}")

    with (
        terminated_as_interrupted(),
        launch_engine(config, on_progress, guard_of(config)) as engine,
    ):
        display.clear()
        try:
            decode = limits.tokenizer.decode
            return measure(engine, smoke, limits.end_token_ids, decode, on_part)
        finally:
            line.clear()


def report_lines(
    now: Baseline, base: Baseline, tolerance: str, parts: tuple[Part, ...], is_good: bool
) -> list[str]:
    lines = [
        f"{now.origin.words()}, {now.origin.ranks} ranks",
        f"baseline: {base.origin.words()}, {base.origin.ranks} ranks, {base.origin.revision}; "
        f"tolerance {tolerance}",
    ]
    for part in parts:
        lines.append(f"{part.name:11} {part.status:4}  {part.told}")
        lines += [f"{'':18}{loss}" for loss in part.losses]
        if part.name == "tool calls" and part.figures["count"] and not takes_tools():
            lines.append(f"{'':18}{NO_TOOLS}")
    failed = ", ".join(part.name for part in parts if part.passed is False)
    return [*lines, "passed" if is_good else f"FAILED: {failed}"]


def to_json(
    now: Baseline, base: Baseline, tolerance: str, parts: tuple[Part, ...], is_good: bool
) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "passed": is_good,
        "tolerance": tolerance,
        "run": asdict(now.origin),
        "baseline": asdict(base.origin),
        "server_takes_tools": takes_tools(),
        "parts": [asdict(part) for part in parts],
    }


def takes_tools() -> bool:
    """Whether requests over HTTP may name tools."""
    from cluster.protocol import UNSUPPORTED_FIELDS

    return "tools" not in UNSUPPORTED_FIELDS


def _counts(now: Baseline) -> dict[str, object]:
    from dataclasses import asdict

    found = now.measured
    parts = {"tool calls": found.tools, "choices": found.choices, "needles": found.needles}
    return {
        "run": asdict(now.origin),
        "texts": len(found.texts),
        "right": {name: [sum(a.is_right for a in each), len(each)] for name, each in parts.items()},
        "scored_positions": len(found.scored),
    }


def _counts_text(now: Baseline) -> str:
    counts = _counts(now)
    right = counts["right"]
    assert isinstance(right, dict)
    told = ", ".join(f"{name} {good} of {count} right" for name, (good, count) in right.items())
    return (
        f"{now.origin.words()}: {counts['texts']} texts, {told}, {counts['scored_positions']} "
        f"positions scored; nothing to compare with"
    )
