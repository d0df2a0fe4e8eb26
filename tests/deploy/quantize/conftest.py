"""Sources of conversions: the random family at widths that every format divides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from deploy.quantize.conversion import Calibration, Conversion
from deploy.quantize.recipe import Recipe
from tests.golden import lowbit_checkpoint
from tests.golden.lowbit_checkpoint import Pair

LAYERS = 2
Convert = Callable[..., Path]


@pytest.fixture(scope="session")
def sources(tiny_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A checkpoint with experts and n-gram table in FP8, and its twin in float32."""
    folder = tmp_path_factory.mktemp("sources")
    return lowbit_checkpoint.write(tiny_checkpoint, "fp8", folder, layers=LAYERS)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """converted(source, experts, dense): the output, not checked on a text; made once each."""
    made: dict[tuple[Path, str, str | None], Path] = {}

    def convert(source: Path, experts: str, dense: str | None = None) -> Path:
        key = source, experts, dense
        if key not in made:
            made[key] = tmp_path_factory.mktemp("converted") / "model"
            convert_into(made[key], source, experts, dense)
        return made[key]

    return convert


def convert_into(
    out: Path, source: Path, experts: str, dense: str | None = None,
    calibration: Calibration | None = None,
) -> None:  # fmt: skip
    work = Conversion(str(source), out, Recipe.parse(experts, dense))
    work.run(calibration, lambda *_: None)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refused(*arguments): what `nrank quantize` says when it takes them for bad input."""

    def run(*arguments: str, code: int = 2) -> str:
        assert main(["quantize", *arguments]) == code
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        assert "Traceback" not in said
        return said

    return run


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
