"""Files that aren't what their name says: refused in one line with the remedy, never waited for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.model_card import load_model_card
from cluster.tokens import Tokenizer
from deploy import cli
from placement.errors import CheckpointError

# To open a FIFO for reading waits for a writer.
pytestmark = pytest.mark.timeout(60)
READ = ("config.json", "generation_config.json")  # at the edge, for limits and defaults
TEXT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DEEP = b'{"a": ' + b"[" * 100_000
ODD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "directory": Path.mkdir,
    "unreadable": lambda path: path.symlink_to("/proc/self/mem"),  # opens, but gives no byte
    "dangling link": lambda path: path.symlink_to("nothing-there"),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
}
odd = pytest.mark.parametrize("make", ODD.values(), ids=ODD)


@pytest.fixture
def model(tmp_path: Path, embedded_model_dir: Path) -> Path:
    """A copy of the embedded model whose files can be replaced; the weights are links."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in embedded_model_dir.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        else:
            shutil.copy(path, folder / path.name)
    return folder


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Runs a command line that has to end with 2 and one line that names file and remedy."""

    def run(path: Path, remedy: str, *arguments: object) -> None:
        assert cli.main([*map(str, arguments)]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("nrank: ")
        assert captured.err.count("\n") == 1
        assert str(path) in captured.err
        assert remedy in captured.err
        assert not captured.out

    return run


def put(path: Path, make: Callable[[Path], object]) -> Path:
    path.unlink(missing_ok=True)
    make(path)
    return path


@odd
def test_a_config_that_decides_the_dtype(
    refused: Callable[..., None], model: Path, make: Callable[[Path], object]
) -> None:
    path = put(model / "config.json", make)
    refused(
        path, "set dtype", "generate", "--model", model, "--device", "cuda", "--prompt-ids", "1"
    )


@odd
def test_a_config_file_of_serve(
    refused: Callable[..., None], tmp_path: Path, make: Callable[[Path], object]
) -> None:
    path = put(tmp_path / "serve.yaml", make)
    refused(path, "check --config", "serve", "--config", path)


@odd
def test_a_file_of_requests(
    refused: Callable[..., None], tmp_path: Path, make: Callable[[Path], object]
) -> None:
    path = put(tmp_path / "requests.jsonl", make)
    refused(path, "check --requests", "generate", "--requests", path)


@odd
@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("flags", [("--chat", "hi"), ("--prompt-ids", "1")])
def test_a_tokenizer_or_template(
    refused: Callable[..., None],
    model: Path,
    name: str,
    flags: tuple[str, str],
    make: Callable[[Path], object],
) -> None:
    path = put(model / name, make)
    refused(path, "copy the file again", "generate", "--model", model, *flags)


@odd
@pytest.mark.parametrize("name", READ)
def test_a_config_at_the_edge(model: Path, name: str, make: Callable[[Path], object]) -> None:
    path = put(model / name, make)
    with pytest.raises(CheckpointError) as caught:
        load_model_card(model, "m", 0)
    assert str(path) in str(caught.value)
    assert "copy the file again" in str(caught.value)


def test_json_and_yaml_nested_without_end(refused: Callable[..., None], model: Path) -> None:
    requests, settings = model / "requests.jsonl", model / "serve.yaml"
    requests.write_bytes(DEEP)
    refused(requests, "is not valid JSON", "generate", "--requests", requests)
    settings.write_bytes(b"[" * 100_000)
    refused(settings, "correct it", "serve", "--config", settings)
    settings.write_text("ranks: 2026-99-99")  # a date that YAML's reader can't make
    refused(settings, "correct it", "serve", "--config", settings)
    for name in READ:
        (model / name).write_bytes(DEEP)
        with pytest.raises(CheckpointError, match="bad JSON"):
            load_model_card(model, "m", 0)
    for name in TEXT[:2]:
        (model / name).write_bytes(DEEP)
        with pytest.raises(CheckpointError, match="is not valid JSON"):
            Tokenizer.load(model)


def test_a_line_of_requests_ends_at_a_newline_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c"}\r\n{"prompt_ids": [99999]}', encoding="utf-8")
    assert cli.main(["generate", "--requests", str(path)]) == 2
    assert "line 2 has token id 99999" in capsys.readouterr().err
