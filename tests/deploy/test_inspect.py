"""`nrank inspect`: figures, dumps of headers, manifests, and what it says of a broken directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy import cli

Run = Callable[..., tuple[int, str, str]]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def nrank(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process; exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def model(random_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A writable model directory of four layers."""
    target = tmp_path / "model"
    target.mkdir()
    for file in random_checkpoint(layers=4).iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def rewrite_index(model: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((model / INDEX).read_text())
    change(index["weight_map"])
    (model / INDEX).write_text(json.dumps(index))


def rewrite_header(file: Path, name: str, **fields: Any) -> None:
    """Changes fields of a tensor's entry; the header keeps its length."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header[name] |= fields
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    file.write_bytes(raw[:8] + text + raw[8 + length :])


def test_figures_of_a_whole_directory(nrank: Run, model: Path) -> None:
    code, out, _ = nrank("inspect", "--model", model, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["runnable"] is True
    assert found["weight_formats"] == {}
    assert sum(found["bytes_per_component"].values()) == found["total_bytes"]
    assert sum(v["tensors"] for v in found["formats"].values()) == found["tensors"]
    assert nrank("inspect", "--model", model)[1].startswith("model: qwen4_exp, ")


def test_a_dump_of_headers_plans_like_the_directory(
    nrank: Run, model: Path, tmp_path: Path
) -> None:
    dump = tmp_path / "headers.json"
    assert nrank("inspect", "--model", model, "--dump-headers", dump)[0] == 0
    _, here, _ = nrank("plan", "--model", model, "--ranks", "3", "--json")
    _, there, _ = nrank(
        "plan", "--model-config", model / "config.json", "--headers", dump, "--ranks", "3", "--json"
    )
    assert json.loads(here)["ranks"] == json.loads(there)["ranks"]
    code, _, err = nrank("inspect", "--model", model, "--dump-headers", "/no/where/h.json")
    assert code == 2
    assert "/no/where/h.json: can't be written" in err


def test_a_manifest_is_written_and_found_equal_until_a_bit_flips(nrank: Run, model: Path) -> None:
    code, out, err = nrank("inspect", "--model", model, "--write-manifest", "--json")
    assert code == 0
    assert err == ""  # progress is for terminals
    count = json.loads(out)["manifest"]["tensors"]
    code, out, _ = nrank("inspect", "--model", model, "--verify")
    assert code == 0
    assert f"manifest: {count} tensors equal to {model}" in out
    file = next(model.glob("model-*1*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 128
    file.write_bytes(data)
    code, out, err = nrank("inspect", "--model", model, "--verify")
    assert code == 2
    assert str(file) in err
    assert err.count("\n") == 1
    assert not out


Break = Callable[[Path], object]


def into_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def first_file(model: Path) -> Path:
    return model / json.loads((model / INDEX).read_text())["weight_map"][TENSOR]


TENSOR = "model.layers.3.self_attn.k_proj.weight"
BREAKS: dict[str, tuple[Break, list[str]]] = {
    "missing": (lambda m: rewrite_index(m, lambda w: w.pop(TENSOR)), ["missing", TENSOR]),
    "extra": (
        lambda m: rewrite_index(m, lambda w: w.update({"model.stray": w[TENSOR]})),
        ["model.stray", "no shard holds it"],
    ),
    "twice in the index": (
        lambda m: (m / INDEX).write_text(
            (m / INDEX).read_text().replace('"weight_map": {', f'"weight_map": {{"{TENSOR}": "a",')
        ),
        [INDEX, TENSOR, "twice"],
    ),
    "dtype": (
        lambda m: rewrite_header(first_file(m), TENSOR, dtype="I32"),
        [TENSOR, ".safetensors", "has dtype I32"],
    ),
    "size": (
        lambda m: rewrite_header(first_file(m), TENSOR, dtype="F64"),
        [TENSOR, ".safetensors", "needs"],
    ),
    "truncated": (
        lambda m: first_file(m).write_bytes(first_file(m).read_bytes()[:-2]),
        [".safetensors", "truncated"],
    ),
    "unreadable": (
        lambda m: into_directory(first_file(m)),
        [".safetensors", "can't be read"],
    ),
    "no config": (lambda m: (m / "config.json").unlink(), ["config.json"]),
    "unknown family": (
        lambda m: (m / "config.json").write_text('{"model_type": "other"}'),
        ["config.json", "'other'", "qwen4_exp"],
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_each_fault_is_one_line_with_file_and_tensor(nrank: Run, model: Path, name: str) -> None:
    breaks, words = BREAKS[name]
    breaks(model)
    code, out, err = nrank("inspect", "--model", model)
    assert code == 2
    assert err.count("\n") == 1
    assert not out
    for word in words:
        assert word in err, err


def test_json_lists_what_is_unknown_and_missing(nrank: Run, model: Path) -> None:
    wrong = TENSOR.replace("k_proj", "key_proj")
    rewrite_name(first_file(model), TENSOR, wrong)
    rewrite_index(model, lambda w: w.update({wrong: w.pop(TENSOR)}))
    code, out, err = nrank("inspect", "--model", model, "--json")
    found = json.loads(out)
    assert code == 2
    assert found["missing_tensors"] == [TENSOR]
    assert found["unknown_tensors"] == [{"name": wrong, "nearest": TENSOR}]
    assert f"{wrong}, nearest known {TENSOR}" in err


def rewrite_name(file: Path, name: str, wanted: str) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header[wanted] = header.pop(name)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
