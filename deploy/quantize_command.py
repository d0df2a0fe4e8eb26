"""`nrank quantize`: a model directory in BF16 or FP8 into one with packed weights."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.flags import add_command, add_model_flag, model_path
from placement.errors import ConfigError

if TYPE_CHECKING:
    from deploy.quantize.conversion import Calibration
    from placement.spec import ModelSpec

DONE, FAILED = 0, 1
MOST_TOKENS = 512  # of a calibration text: the check runs recurrent layers token by token
IDS_WITHOUT_TEXT = 128


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "quantize",
        "Pack a model's weights, a layer at a time, and check the result on a text; exits 1 when "
        "the residual grows where it should not. The same command goes on with a conversion that "
        "was interrupted.",
        "nrank quantize --model /models/my-model --format w4g32 --out /models/my-model-w4",
    )
    add_model_flag(parser)
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="folder to make; none that holds other files")
    add("--format", required=True, metavar="F",
        help="of routed experts: w4g32, w4g128, w8_sym, w2, ... or by layer: w4b32:0-31,w2:32-44; "
        "bf16 leaves a layer as it is")  # fmt: skip
    add("--dense", metavar="F",
        help="of projections, shared experts and the head (default: as they are)")  # fmt: skip
    add("--calibration", metavar="FILE", help="text that the result is checked on (has a default)")
    add("--json", action="store_true", help="print the receipts as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 when the output is complete and nothing is flagged, else 1."""
    import torch

    from deploy.certify_command import terminated_as_interrupted
    from deploy.quantize.conversion import Conversion
    from deploy.quantize.journal import RECEIPTS
    from deploy.quantize.recipe import Recipe
    from deploy.quantize.report_text import Progress, report_lines

    recipe = Recipe.parse(arguments.format, arguments.dense)
    torch.set_num_threads(1)  # sums of the check are then the same on every machine of a kind
    conversion = Conversion(model_path(arguments.model), Path(arguments.out), recipe)
    calibration = calibration_of(conversion.spec, conversion.model_dir, arguments.calibration)
    progress = Progress(sys.stderr)
    with terminated_as_interrupted():
        try:
            outcome = conversion.run(calibration, progress.update)
        except KeyboardInterrupt:
            progress.clear()
            print("nrank: the same command goes on with the next file", file=sys.stderr)
            raise
        finally:
            progress.clear()
    receipts = outcome.receipts
    try:
        lines = list(report_lines(receipts, arguments.out, outcome.was_complete))
    except (LookupError, TypeError, AttributeError, ValueError):  # of a file that somebody edited
        raise ConfigError(
            f"--out {arguments.out}: {RECEIPTS} can't be read; remove the folder and give the same "
            "command again"
        ) from None
    print(json.dumps(receipts) if arguments.json else "\n".join(lines))
    return FAILED if receipts["growth"] and receipts["growth"]["flags"] else DONE


def calibration_of(spec: ModelSpec, model_dir: str, file: str | None) -> Calibration | None:
    """Tokens of a text, or of the whole vocabulary where there is no tokenizer; None for a model
    that no rank can run.
    """
    from deploy.probe_command import PROMPT
    from deploy.quantize.conversion import Calibration

    if not spec.runnable:
        return None
    if not Path(model_dir, "tokenizer.json").exists():
        if file is not None:
            raise ConfigError(f"--calibration {file}: {model_dir} has no tokenizer.json to read it")
        ids = [(7 * i * i + 3 * i) % spec.vocab for i in range(IDS_WITHOUT_TEXT)]
        return Calibration(tuple(ids), "ids from all over the vocabulary, there is no tokenizer")
    from cluster.tokens import Tokenizer

    found = Tokenizer.load(model_dir).encode(PROMPT if file is None else read_text(file))
    if not found:
        raise ConfigError(f"--calibration {file} is empty; give some lines of text")
    origin = "built-in text" if file is None else Path(file).name
    return Calibration(found[:MOST_TOKENS], origin)


def read_text(path: str) -> str:
    from placement.headers import require_regular

    try:
        require_regular(path)
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"--calibration {path}: can't be read ({reason})") from error
