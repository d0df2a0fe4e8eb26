"""Results of operators on one machine: written, believed there alone, and acted upon."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy import cli
from deploy.doctor.operators import probe_operators
from ops.capability_file import SCHEMA, OpResult, identity, with_results, write
from ops.cpu import torch_variants
from ops.registry import OpSet, variants_of
from ops.spec import PASSED, Capability
from placement.errors import ConfigError
from placement.models.registry import load_model_spec
from rank_worker import op_probe
from rank_worker.op_probe import sizes_of

HERE = Capability("cpu", "some-chip", torch.float32, (("library", "2.13.0"),))
MODEL = "family/64/0a1b2c3d"
NORM = "ops.cpu.torch_variants.rms_norm"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ops.json"
    results = {NORM: OpResult("rms_norm", "failed: 561103"), "x.y": OpResult("route", PASSED, 0.1)}
    write(path, HERE, MODEL, results)
    assert [p.name for p in tmp_path.iterdir()] == ["ops.json"]
    return path


def test_an_operator_that_failed_is_passed_over(file: Path) -> None:
    only_torch = [one for one in variants_of("cpu") if "torch_variants" in one.name]
    before = {one.op: one for one in OpSet(HERE, variants=only_torch).op_info()}
    found = {
        one.op: one for one in OpSet(with_results(HERE, MODEL, file), variants=only_torch).op_info()
    }
    assert before["rms_norm"].implementation == NORM
    assert found["rms_norm"].backend == "reference"
    assert found["rms_norm"].fallback_reason == f"{NORM}: the capability file says: failed: 561103"
    assert found["route"] == before["route"]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (replace(HERE, soc="other"), "is of soc 'some-chip', this rank has 'other'"),
        (replace(HERE, dtype=torch.float16), "is of dtype 'float32', this rank has 'float16'"),
        (replace(HERE, versions=(("library", "2.14"),)), "library '2.13.0', this rank has '2.14'"),
        (replace(HERE, versions=()), "is of library '2.13.0', this rank has None"),
    ],
)
def test_a_foreign_or_stale_file_is_refused(file: Path, other: Capability, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        with_results(other, MODEL, file)
    assert str(error.value).endswith("; run nrank doctor --ops again")
    assert "\n" not in str(error.value)


def test_a_file_of_another_model_is_refused(file: Path) -> None:
    told = "is of model 'family/64/0a1b2c3d', this rank has 'family/128/4e5f6071'; run nrank doctor"
    with pytest.raises(ConfigError, match=told):
        with_results(HERE, "family/128/4e5f6071", file)


def test_the_sizes_of_a_model_are_those_of_its_layers(
    embedded_model_dir: Path, random_checkpoint: Callable[..., Path]
) -> None:
    packed = embedded_model_dir.with_name("tiny-flash-next-w4")
    names = (embedded_model_dir, packed, random_checkpoint(layers=4))
    mine, in_w4, other = (sizes_of(load_model_spec(str(name))[0]) for name in names)
    assert mine == in_w4
    assert mine != other
    assert mine.startswith("qwen4_exp/")


def text_of(**changes: Any) -> str:
    return json.dumps({"schema": SCHEMA, "identity": {}, "operators": {}, **changes})


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", text_of()[:-1], "[" * 100_000, text_of(operators=3), text_of(identity=[1]),
        text_of(identity=None), text_of(identity="cpu"), text_of(operators={NORM: "passed"}),
        text_of(operators={NORM: {"result": None}}), text_of(operators={NORM: {"result": 1}}),
    ],
    ids=range(12),
)  # fmt: skip
def test_a_file_of_something_else_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match="holds no results of operators"):
        with_results(HERE, MODEL, file)


def test_a_file_of_another_schema_or_none_is_refused(file: Path) -> None:
    told = json.loads(file.read_text())
    file.write_text(json.dumps({**told, "schema": 1}))
    with pytest.raises(ConfigError, match="has schema 1, this version reads 2"):
        with_results(HERE, MODEL, file)
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        with_results(HERE, MODEL, file.with_name("none"))


def test_results_do_not_belong_to_the_identity(file: Path) -> None:
    assert identity(with_results(HERE, MODEL, file), MODEL) == identity(HERE, MODEL)


def test_doctor_finds_a_wrong_and_a_broken_operator(
    embedded_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any) -> Any:
        return torch_variants.rms_norm(*arguments) + 0.01

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("does not support opType\nC++ frames")

    by_name = {one.name: one for one in variants_of("cpu") if "torch_variants" in one.name}
    route = "ops.cpu.torch_variants.route"
    seeded = {NORM: wrong, route: broken}
    variants = []
    for name, one in by_name.items():
        if name in seeded:
            seeded[name].__module__, _, seeded[name].__name__ = name.rpartition(".")
            one = replace(one, function=seeded[name])
        variants.append(one)
    monkeypatch.setattr(op_probe, "variants_of", lambda backend: tuple(variants))
    path = tmp_path / "ops.json"
    findings = probe_operators("cpu", str(embedded_model_dir), "float32", path)
    bad = {f.subject: f.found for f in findings if f.severity != "ok"}
    assert set(bad) == {NORM, route}
    assert bad[NORM].startswith("failed: off by 0.00")
    assert bad[route] == "failed: RuntimeError: does not support opType"
    assert len(findings) > 4
    assert json.loads(path.read_text())["operators"][route]["result"] == bad[route]


def test_the_command_writes_its_file_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op_probe, "variants_of", lambda backend: ())
    command = ["doctor", "--device", "cpu", "--ops"]
    assert cli.main([*command, str(tmp_path / "none" / "ops.json")]) == 2
    assert "ops.json can't be written: No such file or directory" in capsys.readouterr().err
    assert cli.main([*command, str(tmp_path / "ops.json")]) == 0
    assert json.loads((tmp_path / "ops.json").read_text())["operators"] == {}
