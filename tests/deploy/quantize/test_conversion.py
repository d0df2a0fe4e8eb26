"""What `nrank quantize` makes: packed experts, all else bit for bit, the same at every run."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from deploy.bench.sides import make_sides
from deploy.cli import main
from deploy.defaults import EMBEDDED_MODEL
from deploy.quantize.config_file import patterns
from deploy.quantize.conversion import Calibration, Conversion
from deploy.quantize.growth import check_growth
from deploy.quantize.journal import JOURNAL, RECEIPTS
from deploy.quantize.packing import pack_matrix
from deploy.quantize.recipe import Recipe, writer_of
from deploy.quantize.shard_file import ShardFile
from deploy.quantize.shards import Copy, Entry, Shard
from deploy.quantize.source import Matrix, Source
from ops.lowbit.pack import Writer, quantise, stored
from ops.lowbit.packed import dequantised
from placement import formats
from placement.headers import TensorHeader, read_file_headers, read_headers
from placement.models.registry import load_model_spec
from tests.deploy.quantize.conftest import LAYERS, Convert, convert_into, files_of
from tests.golden.lowbit_checkpoint import Pair

SHIPPED = EMBEDDED_MODEL.with_name("tiny-flash-next-w4")
IDS = torch.tensor([(7 * i * i + 3 * i) % 500 for i in range(40)])


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def test_experts_are_packed_and_all_else_is_the_same_bit_for_bit(
    sources: Pair, converted: Convert
) -> None:
    source, made = read_all(sources.twin), read_all(converted(sources.twin, "w4g32"))
    for name, tensor in source.items():
        if ".experts." in name:
            base = name.removesuffix(".weight")
            packed = stored(base, quantise(tensor, formats.W4G32), Writer.COMPRESSED)
            for part, one in packed.items():
                assert torch.equal(made.pop(part), one), part
        else:
            assert torch.equal(made.pop(name), tensor), name
    assert not made


def test_every_tensor_begins_at_a_multiple_of_its_item_size() -> None:
    """Readers that map a file make tensors of it in place: codes of odd length come last."""
    entries = (Entry("a", "I8", (3,)), Entry("b", "F16", (1,)), Entry("c", "I64", (2,)))
    header = TensorHeader("file", "I8", (3,), 0, 3)
    shard = Shard("out", "0", (Copy("0", "dense", "a", header, entries),))
    assert len(shard.header) % 8 == 0
    described = json.loads(shard.header[8:])
    spans = {name: described[name]["data_offsets"] for name in "abc"}
    assert spans == {"c": [0, 16], "b": [16, 18], "a": [18, 21]}


def test_dense_leaves_routers_streams_norms_and_states_alone(
    sources: Pair, converted: Convert
) -> None:
    spec, _ = load_model_spec(str(converted(sources.twin, "f32", "w8_sym")))
    packed = {one.role for one in (*spec.tensors, *spec.draft_tensors) if one.format is not None}
    last = {role.rpartition(".")[2] for role in packed}
    assert last == {
        "head", "qkv", "z", "out", "q", "k", "v", "o", "index_qk", "fc_embedding", "fc_hidden",
        "shared_gate_proj", "shared_up_proj", "shared_down",
    }  # fmt: skip


def test_fp8_is_taken_apart_into_the_values_that_it_stands_for(
    sources: Pair, converted: Convert
) -> None:
    """From FP8 come the codes that come from its values in float32; the FP8 table stays."""
    packed, twin = (
        read_all(converted(folder, "w4g32")) for folder in (sources.packed, sources.twin)
    )
    experts = [name for name in twin if ".experts." in name]
    assert len(experts) > 9 * LAYERS
    assert all(torch.equal(packed[name], twin[name]) for name in experts)
    tables = [name for name in packed if "ngram_embedding" in name]
    source = read_all(sources.packed)
    assert "F8_E4M3" in {one.dtype for one in read_headers(str(sources.packed)).tensors.values()}
    for name in tables:
        assert torch.equal(packed[name].view(torch.uint8), source[name].view(torch.uint8))


def test_a_layer_that_stays_plain_gets_the_floats_of_fp8(sources: Pair, tmp_path: Path) -> None:
    convert_into(tmp_path / "out", sources.packed, f"w8_sym:0,f32:1-{LAYERS}")
    made, twin = read_all(tmp_path / "out"), read_all(sources.twin)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert torch.equal(made[name], twin[name])
    assert made[name.replace("layers.1", "layers.0")].dtype is torch.int8


def test_a_bank_of_experts_becomes_single_matrices(random_checkpoint: Any, tmp_path: Path) -> None:
    split, fused = (random_checkpoint(layers=4, experts=how) for how in ("split", "fused"))
    for name, folder in (("split", split), ("fused", fused)):
        convert_into(tmp_path / name, folder, "w4g32")
    one, other = read_all(tmp_path / "split"), read_all(tmp_path / "fused")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_receipts_tell_the_error_of_every_matrix(sources: Pair, converted: Convert) -> None:
    receipts = json.loads((converted(sources.twin, "w4g32") / RECEIPTS).read_text())
    assert set(receipts["matrices"]) == {*map(str, range(LAYERS)), "draft"}
    rows = {one["name"]: one for group in receipts["matrices"].values() for one in group}
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    was = read_all(sources.twin)[name]
    off = dequantised(quantise(was, formats.W4G32)) - was
    assert rows[name]["error"] == pytest.approx((off.norm() / was.norm()).item(), rel=1e-3)
    assert rows[name]["largest_error"] == pytest.approx(off.abs().max().item(), rel=1e-3)
    bytes_of = receipts["components"]["routed_experts"]
    assert bytes_of["before_bytes"] / bytes_of["after_bytes"] == pytest.approx(4 * 16 / 9, rel=0.01)


@pytest.mark.parametrize("name", ["w4g32", "w4b32:0,w2:1-2"])
def test_inspect_and_plan_show_what_was_made(
    sources: Pair, converted: Convert, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = str(converted(sources.twin, name))
    assert main(["inspect", "--model", folder, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert set(summary["weight_formats"]) == set(re.findall(r"w\d\w*", name))
    assert summary["runnable"]
    assert not summary["remarks"]
    assert main(["plan", "--model", folder, "--ranks", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["ranks"][0]["rows"]
    assert rows["scales"] > 0


def test_the_shipped_model_is_what_the_command_makes(tmp_path: Path) -> None:
    """And so the same at every run; its check on a text as well."""
    out = tmp_path / EMBEDDED_MODEL.name
    assert main(["quantize", "--format", "w4g32", "--out", str(out)]) == 0
    made, expected = files_of(out), files_of(SHIPPED)
    expected.pop("README.md")
    assert made.keys() == expected.keys()
    receipts = [json.loads(files.pop(RECEIPTS)) for files in (made, expected)]
    assert made == expected
    growth = [one.pop("growth") for one in receipts]
    assert receipts[0] == receipts[1]
    for mine, theirs in zip(*(one["layers"] for one in growth), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-2)


def test_a_killed_run_is_gone_on_with_to_the_same_bytes(
    sources: Pair, converted: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at every rename in turn; the model can't be loaded before all is there."""
    expected, count = files_of(converted(sources.twin, "w4g32")), 0
    real = os.replace
    left = 0

    class Killed(BaseException):
        pass

    def replace(source: Any, target: Any) -> None:
        nonlocal left
        if not left:
            raise Killed
        left -= 1
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    out = tmp_path / "model"
    while not (out / RECEIPTS).exists():
        count += 1
        left = count  # the last steps are done again each time
        try:
            convert_into(out, sources.twin, "w4g32")
        except Killed:
            whole = {path.name for path in out.glob("model-*.safetensors")}
            if len(whole) < LAYERS + 2:
                assert not (out / "config.json").exists()
                assert not (out / "model.safetensors.index.json").exists()
    assert count > 3
    assert files_of(out) == expected
    assert not (out / JOURNAL).exists()


def test_whole_files_are_not_made_again_and_a_torn_line_is_forgotten(
    sources: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model"

    def stop_before_the_rest() -> dict[str, int]:
        work = Conversion(str(sources.twin), out, Recipe.parse("w4g32", None))
        monkeypatch.setattr(work, "_write_rest", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            work.run(None, lambda *_: None)
        return {path.name: path.stat().st_mtime_ns for path in sorted(out.glob("*.safetensors"))}

    before = stop_before_the_rest()
    assert len(before) == LAYERS + 2
    with (out / JOURNAL).open("a") as journal:
        journal.write('{"file": "model-0000')
    lost = min(before)
    (out / lost).unlink()
    after = stop_before_the_rest()
    assert {name for name in before if before[name] != after[name]} == {lost}
    assert stop_before_the_rest() == after, "the line of the file that was made again is whole"


def test_what_a_killed_run_left_of_small_files_is_cleared(
    sources: Pair, converted: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal's own beginning is no other file; the rest goes when the run goes on."""
    expected, out = files_of(converted(sources.twin, "w4g32")), tmp_path / "model"
    out.mkdir()
    (out / f".{JOURNAL}.0123abcd.part").write_text('{"as')
    work = Conversion(str(sources.twin), out, Recipe.parse("w4g32", None))
    monkeypatch.setattr(work, "_write_rest", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        work.run(None, lambda *_: None)
    assert not list(out.glob(".*"))
    for name in ("config.json", "model.safetensors.index.json"):
        (out / f".{name}.89abcdef.part").write_text("{")
    convert_into(out, sources.twin, "w4g32")
    assert files_of(out) == expected


def test_a_file_that_is_made_again_gives_its_room_back_first(tmp_path: Path) -> None:
    """As large, but not in the journal: the run was killed between the two."""
    header = TensorHeader("file", "I8", (3,), 0, 3)
    shard = Shard("out", "0", (Copy("0", "dense", "a", header, (Entry("a", "I8", (3,)),)),))
    for name in ("out", "out.part"):
        (tmp_path / name).write_bytes(b"old")
    with ShardFile(tmp_path, shard) as file:
        assert not (tmp_path / "out").exists()
        file.write("a", torch.ones(3, dtype=torch.int8))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_files_beside_the_weights_go_along_byte_for_byte(sources: Pair, tmp_path: Path) -> None:
    """A SentencePiece model is no text."""
    shutil.copytree(sources.twin, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.model").write_bytes(b"\x0a\xff\xfe\x00\r\n")
    (tmp_path / "model" / "merges.txt").write_bytes(b"a b\r\nc d\r\n")
    convert_into(tmp_path / "out", tmp_path / "model", "w4g32")
    for name in ("tokenizer.model", "merges.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


@pytest.mark.parametrize("form", [formats.NVFP4, formats.W4G32, formats.FP8_BLOCK128])
def test_a_large_matrix_is_packed_in_bands_to_what_it_is_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: formats.WeightFormat
) -> None:
    """Also where one scale stands for all of it: the largest value is in the last band."""
    values = torch.randn(300, 128, generator=torch.Generator().manual_seed(3))
    values[299, 7] = 9.0
    save_file({"m.weight": values}, tmp_path / "m.safetensors")
    headers, _ = read_file_headers(str(tmp_path / "m.safetensors"))
    header = headers["m.weight"]
    read = list[int]()
    real = Source.rows

    def rows(source: Source, matrix: Matrix, first: int, stop: int) -> torch.Tensor:
        read.append(stop - first)
        return real(source, matrix, first, stop)

    monkeypatch.setattr(Source, "rows", rows)
    monkeypatch.setattr("deploy.quantize.packing.BAND_BYTES", 1)
    with Source() as source:
        matrix = Matrix("m.weight", (300, 128), header, header.offset)
        made, _ = pack_matrix(source, matrix, form)
    whole = stored("m", quantise(values, form), writer_of(form))
    assert made.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(made[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    assert max(read) == 128


def test_a_residual_that_grows_is_flagged_with_layer_and_expert(
    sources: Pair, tmp_path: Path
) -> None:
    """As where an expert was packed with a scale that is too large."""
    out = tmp_path / "model"
    convert_into(out, sources.twin, "w4g32")
    good = check_growth(str(sources.twin), str(out), IDS, lambda *_: None)
    assert not good.flags
    assert len(good.layers) == LAYERS
    header = read_headers(str(out)).tensors["model.layers.1.mlp.experts.5.down_proj.weight_scale"]
    with open(header.file, "r+b") as file:
        file.seek(header.offset)
        scale = torch.frombuffer(bytearray(file.read(header.nbytes)), dtype=torch.float16)
        file.seek(header.offset)
        file.write((scale * 100).numpy().tobytes())
    bad = check_growth(str(sources.twin), str(out), IDS, lambda *_: None)
    assert [(flag.layer, flag.expert) for flag in bad.flags] == [(1, 5)]
    assert bad.layers[0] == good.layers[0]
    assert bad.divergence > good.divergence


def test_a_residual_of_nothing_is_no_growth(sources: Pair, tmp_path: Path) -> None:
    """As of tokens whose embedding was never trained; the table of n-grams comes in layer 1."""
    shutil.copytree(sources.twin, tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"].zero_()
    save_file(tensors, file)
    convert_into(tmp_path / "out", tmp_path / "model", "w4g32")
    found = check_growth(str(tmp_path / "model"), str(tmp_path / "out"), IDS, lambda *_: None)
    assert found.layers[0].source_rms == found.layers[0].packed_rms == 0
    assert found.layers[0].source_growth == found.layers[1].source_growth == 1
    assert not found.flags


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "model.embed_tokens.weight",
            "FLAGGED layer 0: the RMS of the residual is beyond what float32 holds",
        ),
        ("lm_head.weight", "FLAGGED logits: the answers of the two models can't be compared"),
    ],
)
def test_figures_that_overflow_fail_the_command_and_are_null_in_the_receipts(
    sources: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    shutil.copytree(sources.twin, tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    tensors[name].fill_(1e38)
    save_file(tensors, file)
    line = ["quantize", "--model", str(tmp_path / "model"), "--format", "w4g32", "--out"]
    for again in (False, True):
        assert main([*line, str(tmp_path / "out")]) == 1, again
        assert said in capsys.readouterr().out
    text = (tmp_path / "out" / RECEIPTS).read_text()
    growth = json.loads(text, parse_constant=pytest.fail)["growth"]
    rows = growth["layers"]
    assert None in (growth["divergence"], rows[0]["packed_rms"])


def test_a_flag_makes_the_command_fail(
    sources: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("deploy.quantize.growth.LAYER_BOUND", 0.5)
    line = ["quantize", "--model", str(sources.twin), "--format", "w4g32"]
    assert main([*line, "--out", str(tmp_path / "model")]) == 1
    said = capsys.readouterr().out
    assert "FLAGGED layer 0, expert" in said
    assert "GROWS" in said
    assert main([*line, "--out", str(tmp_path / "model")]) == 1, "it stays flagged"
    assert "was complete already" in capsys.readouterr().out


def test_patterns_name_the_modules_of_a_format_and_no_others() -> None:
    experts = [f"m.layers.{n}.experts.{e}.up" for n in range(3) for e in range(2)]
    every = {*experts, "m.layers.0.shared.up"}
    assert patterns(experts, every) == [r"re:m\.layers\.\d+\.experts\.\d+\.up$"]
    assert patterns(experts[:2], every) == [r"re:m\.layers\.0\.experts\.\d+\.up$"]
    assert patterns(experts[:1], every) == experts[:1]


def test_the_calibration_is_part_of_what_was_asked_for(sources: Pair, tmp_path: Path) -> None:
    convert_into(tmp_path / "out", sources.twin, "w8_sym", calibration=Calibration((1, 2), "two"))
    receipts = json.loads((tmp_path / "out" / RECEIPTS).read_text())
    assert receipts["calibration"] == {"tokens": 2, "origin": "two"}
    assert receipts["growth"]["layers"][1]["packed_rms"] > 0


def test_bench_sets_the_shipped_model_beside_its_source() -> None:
    against = f"model={SHIPPED},dtype=float32"
    sides = make_sides(str(EMBEDDED_MODEL), 1, "dtype=bfloat16", against)
    assert not sides.has_same_ids
    sizes = sides.expert_bytes()
    assert sizes is not None
    assert sizes[0] >= 3.5 * sizes[1]
    same = make_sides(str(EMBEDDED_MODEL), 1, "", "mtp=0")
    assert same.has_same_ids
    assert same.expert_bytes() is None
    assert not make_sides(str(SHIPPED), 1, "", "int8_activations=on").has_same_ids
