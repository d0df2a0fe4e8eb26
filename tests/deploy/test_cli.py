"""The command line: exit codes, one-line errors, and what each command can do without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy import cli, inspect_command
from deploy.defaults import BUILT_IN_DEVICES, DEVICES
from placement.errors import ConfigError

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def nrank(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse ends --help and usage errors this way
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def run_without(blocked: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process where the named packages can't be imported."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}));"
        "from deploy.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", ["serve", "generate", "plan", "inspect", "doctor", "report"])
def test_every_command_helps_with_an_example(nrank: Run, command: str) -> None:
    code, out, _ = nrank(command, "--help")
    assert code == 0
    assert f"example: nrank {command} " in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan", "--ranks", "0"], "0 is below 1"),
        (["plan", "--ranks", "two"], "'two' is not a whole number"),
        (["plan", "--ranks", "15"], "14 experts"),
        (["plan", "--chip", "abacus"], "abacus"),
        (["plan", "--context", "32769"], "32768"),
        (["plan", "--model", "/no/where"], "/no/where is no model directory"),
        (["plan", "--model-config", "/no/where.json"], "/no/where.json"),
        (["plan", "--headers", "x.json"], "goes with --model-config"),
        (["inspect", "--model", "/no/where"], "/no/where is no model directory"),
        (["generate"], "is required"),
        (["generate", "--prompt-ids", "1,x"], "'1,x' is no list of whole numbers"),
        (["generate", "--prompt-ids", ""], "the prompt is empty"),
        (["generate", "--prompt-ids", "1,4096"], "token id 4096; this model's ids are 0 to 4095"),
        (["generate", "--prompt-ids", "-1"], "-1"),
        (["generate", "--prompt", "a", "--chat", "b"], "not allowed with"),
        (["generate", "--prompt-ids", "1", "--max-tokens", "0"], "0 is below 1"),
        (["generate", "--prompt-ids", "1,2", "--max-tokens", "32767"], "the context is 32768"),
        (["generate", "--prompt-ids", "1", "--temperature", "-1"], "temperature -1.0"),
        (["generate", "--prompt-ids", "1", "--temperature", "nan"], "temperature nan"),
        (["generate", "--prompt-ids", "1", "--seed", "-1"], "seed -1"),
        (["generate", "--prompt-ids", "1", "--stop", ""], "empty stop string"),
        (["generate", "--prompt-ids", "1", "--mtp", "5"], "mtp = 5, at most 4 drafts"),
        (["generate", "--prompt-ids", "1", "--mtp-auto", "yes"], "invalid choice: 'yes'"),
        (["generate", "--requests", "/no/where.jsonl"], "/no/where.jsonl"),
        (["serve", "--config", "/no/where.yaml"], "/no/where.yaml"),
        (["serve", "--port", "70000"], "port = 70000"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    nrank: Run, arguments: list[str], expected: str
) -> None:
    code, out, err = nrank(*arguments)
    assert code == 2, err
    assert expected in err
    assert err.count("\n") == 1
    assert not out


def test_plan_works_on_a_machine_without_torch_or_ray() -> None:
    done = run_without(
        ["torch", "ray", "numpy", "transformers", "pydantic", "yaml"],
        "plan",
        "--ranks",
        "4",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["fits"] is True
    assert [r["experts"][0] for r in plan["ranks"]] == [[[0, 3]], [[4, 7]], [[8, 10]], [[11, 13]]]


def test_inspect_works_on_a_machine_without_torch_or_ray() -> None:
    done = run_without(["torch", "ray", "numpy", "transformers", "pydantic"], "inspect", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tensors"] == 561
    assert sum(v["bytes"] for v in found["formats"].values()) == found["total_bytes"]
    assert found["unknown_tensors"] == found["missing_tensors"] == []


def test_inspect_refuses_a_directory_with_a_missing_tensor(
    nrank: Run, random_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    for file in random_checkpoint(layers=4).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.3.self_attn.q_norm.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    code, out, err = nrank("inspect", "--model", tmp_path)
    assert code == 2
    assert "model.layers.3.self_attn.q_norm.weight" in err
    assert not out


def test_a_plan_that_does_not_fit_names_row_and_bytes(
    nrank: Run, random_checkpoint: Callable[..., Path]
) -> None:
    model = random_checkpoint(layers=4, max_position=100_000_000)
    code, out, err = nrank("plan", "--model", model, "--json")
    assert code == 3
    plan = json.loads(out)
    assert plan["fits"] is False
    assert plan["shortfall"]["row"] in err
    assert str(plan["shortfall"]["bytes"]) in err
    assert err.count("\n") == 1


def test_plan_from_config_and_headers_equals_the_plan_from_the_directory(
    nrank: Run, embedded_model_dir: Path, tmp_path: Path
) -> None:
    headers: dict[str, Any] = {}
    for file in embedded_model_dir.glob("*.safetensors"):
        raw = file.read_bytes()
        headers |= json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    (tmp_path / "headers.json").write_text(json.dumps(headers))
    config = embedded_model_dir / "config.json"
    _, out, _ = nrank(
        "plan", "--model-config", config, "--headers", tmp_path / "headers.json", "--json"
    )
    _, expected, _ = nrank("plan", "--json")
    rows = [[rank["rows"] for rank in json.loads(text)["ranks"]] for text in (out, expected)]
    assert rows[0] == rows[1]
    (tmp_path / "headers.json").write_text('{"a": {"dtype": "F3", "shape": []}}')
    code, _, err = nrank("plan", "--model-config", config, "--headers", tmp_path / "headers.json")
    assert code == 2
    assert "headers.json: a: " in err


def test_a_plan_for_people_shows_every_rank(nrank: Run) -> None:
    code, out, _ = nrank("plan", "--ranks", "3")
    assert code == 0
    assert "rank 2" in out
    assert "fits" in out


def test_interruption_has_its_own_exit_code(nrank: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect_command, "summarise", interrupt)
    assert nrank("inspect")[0] == 130


def test_a_foreign_package_with_our_name_is_reported(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import deploy.cli as c; "
    code += f"sys.path[:0] = [{str(tmp_path)!r}]; sys.modules.pop('ops', None); "
    code += "sys.exit(c.main(['inspect']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"`import ops` finds {tmp_path}" in done.stderr


@pytest.mark.parametrize(
    ("device", "cause"), [("cuda", "torch finds no GPU here"), ("npu", "torch_npu can't be loaded")]
)
def test_a_device_whose_library_is_missing_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    cause: str,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # importing it is an error
    command = ["generate", "--prompt-ids", "1", "--dtype", "float32", "--device", device]
    assert cli.main(command) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"nrank: --device {device}: {cause}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("device", DEVICES)
def test_built_in_devices_are_those_that_a_rank_can_open(device: str) -> None:
    from rank_worker.device import open_device

    if device in BUILT_IN_DEVICES:
        assert open_device(device).name == device
    else:
        with pytest.raises(ConfigError, match="not built in yet"):
            open_device(device)
