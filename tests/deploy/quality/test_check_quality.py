"""`nrank check-quality` on real gangs of the embedded model, and its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.tokens import Tokenizer
from deploy.cli import main
from deploy.defaults import EMBEDDED_MODEL
from deploy.quality.baseline_file import (
    EMBEDDED_BASELINE,
    Origin,
    baseline_text,
    read_baseline,
    write_baseline,
)
from deploy.quality.smoke_set import SmokeSet, make_smoke_set
from placement.errors import ConfigError

slow = pytest.mark.slow
PACKED_MODEL = EMBEDDED_MODEL.with_name("tiny-flash-next-w4")
Changed = Callable[[Callable[[str, torch.Tensor], torch.Tensor]], Path]


@pytest.fixture
def origin() -> Origin:
    """Where the embedded model's baseline comes from."""
    found = json.loads(EMBEDDED_BASELINE.read_text())["origin"]
    return Origin(**{**found, "formats": tuple(found["formats"])})


@pytest.fixture(scope="session")
def smoke(embedded_model_dir: Path) -> SmokeSet:
    return make_smoke_set(Tokenizer.load(embedded_model_dir), True, 32768)


@pytest.fixture
def changed(embedded_model_dir: Path, tmp_path: Path) -> Changed:
    """changed(f): a copy of the embedded model whose tensors are f(name, tensor)."""

    def make(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
        folder = copytree(embedded_model_dir, tmp_path / "changed")
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            save_file({n: change(n, t).contiguous() for n, t in tensors.items()}, file)
        return folder

    return make


@pytest.fixture
def checked(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """checked(*flags): exit code, and the result with its parts by name."""

    def run(*flags: str) -> tuple[int, dict[str, Any]]:
        torch.set_num_threads(1)
        code = main(["check-quality", "--json", *flags])
        found = json.loads(capsys.readouterr().out)
        return code, {**found, "parts": {part["name"]: part for part in found["parts"]}}

    return run


def rounded(bits: int, group: int = 32) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Experts as symmetric integers with a scale a group, dequantised again."""
    highest = 2 ** (bits - 1) - 1

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if ".experts." not in name:
            return tensor
        groups = tensor.float().unflatten(-1, (-1, group))
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-8) / highest
        values = (groups / scale).round().clamp(-highest - 1, highest) * scale
        return values.flatten(-2).to(tensor.dtype)

    return change


@pytest.mark.parametrize(
    "ranks", ["1", pytest.param("2", marks=slow), pytest.param("3", marks=slow)]
)
def test_the_embedded_model_is_as_good_as_its_baseline(
    checked: Callable[..., tuple[int, dict[str, Any]]], ranks: str
) -> None:
    code, found = checked("--ranks", ranks)
    assert code == 0
    assert found["passed"]
    assert found["tolerance"] == "exact"
    assert [part["passed"] for part in found["parts"].values()] == [True] * 5
    assert found["parts"]["tool calls"]["figures"]["right"] == 4
    assert found["parts"]["needles"]["figures"]["right"] == 9
    assert found["parts"]["logits"]["figures"]["positions"] > 100


@slow
def test_half_precision_is_within_its_tolerance(
    checked: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    code, found = checked("--dtype", "bfloat16")
    assert (code, found["tolerance"]) == (0, "half")
    assert found["parts"]["logits"]["figures"]["mean_kl"] > 0


@slow
def test_experts_of_four_bits_pass_as_low_bit_and_of_two_bits_fail(
    checked: Callable[..., tuple[int, dict[str, Any]]], changed: Changed, tmp_path: Path
) -> None:
    flags = ("--baseline", str(EMBEDDED_BASELINE), "--tolerance", "low-bit")
    assert checked("--model", str(changed(rounded(4))), *flags)[0] == 0
    copied = tmp_path / "changed"
    copied.rename(tmp_path / "four-bits")
    code, found = checked("--model", str(changed(rounded(2))), *flags)
    assert code == 1
    assert not found["parts"]["logits"]["passed"]


@slow
@pytest.mark.parametrize("ranks", ["1", "3"])
def test_the_model_that_is_shipped_in_w4_passes_packed(
    checked: Callable[..., tuple[int, dict[str, Any]]], ranks: str
) -> None:
    flags = ("--baseline", str(EMBEDDED_BASELINE), "--ranks", ranks)
    code, found = checked("--model", str(PACKED_MODEL), *flags)
    assert (code, found["tolerance"]) == (0, "low-bit")
    assert found["parts"]["needles"]["figures"]["right"] == 9


@slow
def test_packed_experts_under_a_wrong_scale_fail(
    checked: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    """Those of one layer, by a factor that a load takes for a scale."""
    folder = copytree(PACKED_MODEL, tmp_path / "scaled")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if ".layers.3." in name and name.endswith("down_proj.weight_scale"):
                tensors[name] *= 4
        save_file(tensors, file)
    code, found = checked("--model", str(folder), "--baseline", str(EMBEDDED_BASELINE))
    assert code == 1
    assert not found["parts"]["logits"]["passed"]


@slow
def test_one_lost_expert_fails_at_the_exact_tolerance(
    checked: Callable[..., tuple[int, dict[str, Any]]], changed: Changed
) -> None:
    lost = "layers.3.mlp.experts.5.down_proj.weight"
    folder = changed(lambda name, tensor: tensor * 0 if name.endswith(lost) else tensor)
    code, found = checked("--model", str(folder), "--baseline", str(EMBEDDED_BASELINE))
    assert code == 1
    assert not found["parts"]["logits"]["passed"]


@slow
def test_the_embedded_baseline_has_the_log_probabilities_of_transformers(
    embedded_model_dir: Path, origin: Origin, smoke: SmokeSet
) -> None:
    from transformers import AutoModelForCausalLM

    base = read_baseline(EMBEDDED_BASELINE, origin, smoke).measured
    model = AutoModelForCausalLM.from_pretrained(embedded_model_dir, dtype=torch.float32).eval()
    positions = iter(base.scored)
    for asking in smoke.scored:
        with torch.inference_mode():
            logprobs = model(torch.tensor([asking.ids])).logits[0].log_softmax(-1)
        for at, token in enumerate(asking.ids[1:]):
            scored = next(positions)
            assert scored.logprob == pytest.approx(logprobs[at, token].item(), abs=1e-4)
            for candidate, value in scored.top:
                assert value == pytest.approx(logprobs[at, candidate].item(), abs=1e-4)
    assert next(positions, None) is None


def test_a_baseline_is_read_as_it_was_written(
    origin: Origin, smoke: SmokeSet, tmp_path: Path
) -> None:
    base = read_baseline(EMBEDDED_BASELINE, origin, smoke)
    write_baseline(tmp_path / "again.json", base)
    assert (tmp_path / "again.json").read_text() == EMBEDDED_BASELINE.read_text()
    assert read_baseline(tmp_path / "again.json", origin, smoke) == base
    assert [file.name for file in tmp_path.iterdir()] == ["again.json"]


def test_a_baseline_belongs_to_model_tokenizer_and_smoke_set(
    origin: Origin, smoke: SmokeSet
) -> None:
    assert origin.smoke_set == smoke.sha256
    for name in ("architecture", "tokenizer", "smoke_set"):
        other = replace(origin, **{name: "another"})
        with pytest.raises(ConfigError, match=f"{name.replace('_', ' ')} .* is not another"):
            read_baseline(EMBEDDED_BASELINE, other, smoke)
    for name, value in (("dtype", "float16"), ("formats", ("w4",)), ("model", "copy")):
        read_baseline(EMBEDDED_BASELINE, replace(origin, **{name: value}), smoke)
    assert replace(origin, formats=("w4",)).tolerance(origin) == "low-bit"
    assert replace(origin, dtype="float16").tolerance(origin) == "half"
    assert origin.tolerance(origin) == "exact"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is no baseline"), ('{"version": 9}', "is a baseline of version 9"),
        ("[]", "is no baseline"), ('{"version": 1, "origin": {}}', "is no baseline"),
    ],
)  # fmt: skip
def test_what_is_no_baseline_is_refused(
    origin: Origin, smoke: SmokeSet, tmp_path: Path, text: str, told: str
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_baseline(file, origin, smoke)


@pytest.mark.parametrize("part", ["texts", "tools", "choices", "needles", "scored"])
def test_a_baseline_that_lacks_an_answer_is_refused(
    origin: Origin, smoke: SmokeSet, tmp_path: Path, part: str
) -> None:
    found = json.loads(EMBEDDED_BASELINE.read_text())
    del found["measured"][part][-1]
    file = tmp_path / "short.json"
    file.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="where the smoke set has"):
        read_baseline(file, origin, smoke)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--context", "300"], "too short for the smoke set, which needs 512"),
        (["--baseline", "/nowhere.json"], "check --baseline"),
        (["--write-baseline", "/nowhere/base.json"], "there is no folder /nowhere"),
        (["--write-baseline", "/tmp"], "is a folder"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    assert main(["check-quality", *flags]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_another_model_needs_a_baseline_of_its_own(
    embedded_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copytree(embedded_model_dir, tmp_path / "copy")
    assert main(["check-quality", "--model", str(folder)]) == 2
    assert "no baseline to compare with" in capsys.readouterr().err


def test_a_baseline_that_can_not_be_written_leaves_the_old_one(
    origin: Origin, smoke: SmokeSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, file = read_baseline(EMBEDDED_BASELINE, origin, smoke), tmp_path / "base.json"
    file.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(Exception, match="No space left on device"):
        write_baseline(file, base)
    assert file.read_text() == "old"
    assert baseline_text(base).startswith("{")
