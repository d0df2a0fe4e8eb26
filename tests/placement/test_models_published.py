"""Published checkpoints: counts and sizes of their tensors, parameters, state and cache bytes.

Sources: the repositories' index files and model cards on Hugging Face; sums are written out.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest

from placement.errors import CheckpointError, ConfigError
from placement.headers import CheckpointHeaders
from placement.models.registry import (
    PLANNED_TYPES,
    RUN_TYPES,
    require_runnable,
    spec_from_config,
)
from placement.spec import Component, DenseSpec, MixerKind, ModelSpec, ResidualKind

Path = Callable[[str], str]
Specs = Callable[[str], ModelSpec]
Published = Callable[[str], CheckpointHeaders]
FLASH, FLASH_FP8 = "Qwen3.8-Flash-Next", "Qwen3.8-Flash-Next-FP8"
SMALL_FP8, GLM = "Qwen3.6-35B-A3B-FP8", "GLM-5.3-Flash"
MIB = 1 << 20


@pytest.fixture(scope="module")
def alone(config_path: Path) -> Specs:
    """The spec that a published config alone gives; each is made once."""
    return cache(lambda name: spec_from_config(config_path(name)))


@pytest.fixture(scope="module")
def seen(config_path: Path, published_headers: Published) -> Specs:
    """The spec that config and headers give."""
    return cache(lambda name: spec_from_config(config_path(name), published_headers(name)))


def parameters(tensors: Any) -> int:
    """Weights without the constants of the n-gram hash."""
    return sum(prod(tensor.shape) for tensor in tensors if tensor.dtype.value != "int64")


@pytest.mark.parametrize(
    ("name", "main", "draft"),
    [
        (FLASH, 176.944, 2.607),  # 120.796 experts + 51.200 table + 0.636 embedding + 4.312 rest
        (FLASH_FP8, 176.944, 2.607),
        (SMALL_FP8, 34.661, 0.845),  # 32.212 experts + 0.509 embedding + 1.940 rest
        (GLM, 313.327, 7.433),  # 304.405 experts + 1.269 embedding and head + 7.653 rest
    ],
)
def test_parameter_counts_in_billions(name: str, main: float, draft: float, alone: Specs) -> None:
    spec = alone(name)
    assert round(parameters(spec.tensors) / 1e9, 3) == main
    assert round(parameters(spec.draft_tensors) / 1e9, 3) == draft


@pytest.mark.parametrize(
    ("name", "count", "gigabytes"),
    [
        # Qwen/Qwen3.8-Flash-Next-FP8: 131 shards; 1,070 dense + 129 table + 333 vision + 29 draft
        # + 147,456 expert tensors + 3,072 of the draft head, each expert matrix with its scale.
        (FLASH_FP8, 1070 + 129 + 333 + 29 + 147456 + 3072, 185.5),
        # Qwen/Qwen3.6-35B-A3B-FP8: 42 shards; 613 + 250 scales + 61,440 + 333 vision + 24 + 1,536.
        (SMALL_FP8, 613 + 250 + 61440 + 333 + 24 + 1536, 37.5),
        # zai-org/GLM-5.3-Flash, index: 38,423 text tensors, 37,338 scales, 347 of vision.
        (GLM, 38423 + 37338 + 347, 328.3),
    ],
)
def test_tensors_and_bytes_of_the_fp8_releases(
    published_headers: Published, name: str, count: int, gigabytes: float, seen: Specs
) -> None:
    headers = published_headers(name)
    spec = seen(name)
    assert spec.total_tensors_on_disk == len(headers.tensors) == count
    size = sum(header.nbytes for header in headers.tensors.values())
    assert round(size / 1e9, 1) == gigabytes
    assert len(spec.ignored_tensors) == (347 if name == GLM else 333)
    assert spec.remarks == ()
    if name == FLASH_FP8:
        require_runnable(spec)
    else:
        with pytest.raises(CheckpointError, match=r"can't be run"):
            require_runnable(spec)


def test_counts_that_the_qwen_releases_state(published_headers: Published) -> None:
    assert len(published_headers(FLASH_FP8).tensors) == 152_089
    assert len(published_headers(SMALL_FP8).tensors) == 64_196


def test_glm_bytes_equal_the_total_size_of_the_published_index(
    published_headers: Published,
) -> None:
    """model.safetensors.index.json of zai-org/GLM-5.3-Flash: total_size 328,326,771,576."""
    tensors = published_headers(GLM).tensors
    assert sum(header.nbytes for header in tensors.values()) == 328_326_771_576
    fp8 = [header for header in tensors.values() if header.dtype == "F8_E4M3"]
    assert sum(header.nbytes for header in fp8) == 314_396_639_232


@pytest.mark.parametrize("name", [FLASH_FP8, SMALL_FP8, GLM])
def test_headers_and_config_alone_give_the_same_spec(name: str, alone: Specs, seen: Specs) -> None:
    one, other = alone(name), seen(name)
    for ours, theirs in zip(
        (*one.tensors, *one.draft_tensors, *one.scale_tensors),
        (*other.tensors, *other.draft_tensors, *other.scale_tensors),
        strict=True,
    ):
        assert (ours.role, ours.shape, ours.split) == (theirs.role, theirs.shape, theirs.split)
        assert (ours.format is None) == (theirs.format is None), ours.role
        assert ours.pieces == theirs.pieces


def test_flash_next_quantises_experts_and_table_only(alone: Specs) -> None:
    spec = alone(FLASH_FP8)
    formats = {(t.component, t.format.name) for t in spec.tensors if t.format is not None}
    assert formats == {
        (Component.ROUTED_EXPERTS, "fp8_block128"),
        (Component.NGRAM_TABLE, "fp8_tensor"),
    }
    scales = {t.role: t for t in spec.scale_tensors}
    assert scales["layers.7.channel.experts_gate_up.scale"].shape == (512, 10, 20)
    assert scales["layers.7.channel.experts_down.scale"].shape == (512, 20, 5)
    assert scales["layers.1.ngram.table.scale"].shape == (1,)
    assert {t.component for t in scales.values()} == {Component.SCALES}
    assert {t.component for t in spec.draft_scale_tensors} == {Component.MTP}


def whole_state(spec: ModelSpec) -> tuple[int, int]:
    """Recurrent and convolution bytes a sequence in 16 bit, of the main layers."""
    slots = [layer.mixer.slot_bytes(layer.mixer.heads.__getitem__, 2) for layer in spec.layers]
    return sum(one.recurrent for one in slots), sum(one.conv for one in slots)


def token_bytes(spec: ModelSpec, draft: bool = False) -> tuple[float, float]:
    """K/V (or latent) and index bytes a token in 16 bit."""
    layers = spec.draft_layers if draft else spec.layers
    pages = [layer.mixer.page_bytes(layer.mixer.heads.__getitem__, 64, 2) for layer in layers]
    return sum(one.kv for one in pages) / 64, sum(one.index for one in pages) / 64


def test_state_and_cache_of_flash_next(alone: Specs) -> None:
    spec = alone(FLASH)
    # 36 layers x 48 heads x 128 x 128 fp32; window of 3 rows of 10,240 channels in 16 bit.
    assert whole_state(spec) == (108 * MIB, 36 * 3 * 10240 * 2)
    # 12 layers x 2 x 2 heads x 256 x 2 bytes; one key of 128 for 4 tokens.
    assert token_bytes(spec) == (24_576, 768)
    assert token_bytes(spec, draft=True) == (2_048, 64)
    assert spec.layers[1].ngram is not None
    assert spec.layers[1].ngram.slot_bytes(10240, 2) == 9 * 10240 * 2 + 2 * 8


def test_state_and_cache_of_the_35b(alone: Specs) -> None:
    spec = alone(SMALL_FP8)
    assert whole_state(spec) == (60 * MIB, 30 * 3 * 8192 * 2)
    assert token_bytes(spec) == (20_480, 0)
    assert token_bytes(spec, draft=True) == (2_048, 0)
    assert spec.residual.kind is ResidualKind.PLAIN


def test_state_and_cache_of_glm(alone: Specs) -> None:
    spec = alone(GLM)
    # 34 layers x 64 heads x 128 x 128 fp32; window of 3 rows of 24,576 channels in 16 bit.
    assert whole_state(spec) == (136 * MIB, 34 * 3 * 24576 * 2)
    # 11 layers x 512 x 2 bytes = 11 KiB; one pooled key of 128 for 4 tokens.
    assert token_bytes(spec) == (11 * 1024, 704)
    assert token_bytes(spec, draft=True) == (1024, 64)


def test_a_rank_holds_its_heads_of_the_state(alone: Specs) -> None:
    mixer = alone(GLM).layers[0].mixer
    # 64 heads over 6 ranks: 11 on the first, 4 MiB x 11/64 a layer.
    assert mixer.slot_bytes(lambda _: 11, 2).recurrent == 11 * 128 * 128 * 4
    latent = alone(GLM).layers[3].mixer
    assert latent.page_bytes(lambda _: 0, 64, 2).kv == 64 * 512 * 2  # not split by head


def test_layers_of_glm(alone: Specs) -> None:
    spec = alone(GLM)
    kinds = [layer.mixer_kind for layer in spec.layers]
    assert [i for i, k in enumerate(kinds) if k is MixerKind.LATENT_ATTENTION] == list(
        range(3, 45, 4)
    )
    assert [isinstance(layer.channel, DenseSpec) for layer in spec.layers] == [True] * 3 + [
        False
    ] * 42
    assert spec.num_experts == 288
    assert len(spec.draft_tensors) == 25 + 2  # and two of stacked experts
    assert {p.name.split(".")[3] for t in spec.draft_tensors for p in t.pieces} == {"45"}
    assert not any("site" in t.role for t in spec.draft_tensors)
    assert spec.eos_token_ids == (154820, 154827, 154829)


def test_glm_experts_in_four_and_two_bits(config_path: Path) -> None:
    """W4 in layers 3-32 and W2 in 33-44, both with F32 scales a block of 32 x 32.

    12,681,216 bytes an expert in W4 and 6,389,760 in W2; 72 experts a rank of four: 30 layers of
    the first and 12 of the second are 32,912,179,200 bytes, the size that a public header audit
    of such a checkpoint reports.
    """
    spec = spec_from_config(config_path(GLM), format="w4b32:3-32,w2:33-44")
    share = sum(
        t.payload_bytes((72, *t.shape[1:])) + t.scale_bytes((72, *t.shape[1:]))
        for t in spec.tensors
        if t.component is Component.ROUTED_EXPERTS
    )
    assert share == 30 * 72 * 12_681_216 + 12 * 72 * 6_389_760 == 32_912_179_200
    assert spec.formats() == ("w4b32", "w2")  # all else is plain, although the config says FP8
    assert {t.format for t in spec.draft_tensors} == {None}  # no range holds layer 45
    every = spec_from_config(config_path(GLM), format="w4b32")
    drafts = {t.format.name for t in every.draft_tensors if t.format is not None}
    assert drafts == {"w4b32"}


def test_a_format_leaves_everything_but_experts_alone(config_path: Path, alone: Specs) -> None:
    plain = alone(FLASH)
    spec = spec_from_config(config_path(FLASH), format="w4g128")
    for before, after in zip(plain.tensors, spec.tensors, strict=True):
        if before.component is Component.ROUTED_EXPERTS:
            assert after.format is not None
            assert after.format.name == "w4g128"
        else:
            assert before == after
    experts = [t for t in spec.tensors if t.format is not None]
    size = sum(t.payload_bytes(t.shape) + t.scale_bytes(t.shape) for t in experts)
    assert round(size / 2**30, 1) == 58.0  # 120.796 G weights x (1/2 + 2/128) bytes
    with pytest.raises(CheckpointError, match="planned as w4g128"):
        require_runnable(spec)


def test_formats_that_cannot_be(config_path: Path) -> None:
    for text, words in {
        "w5": "'w5' is unknown, known: f32, bf16",
        "w4g128:9-3": "'9-3' is no range",
        "w4g128:0-9": "nothing about layer 10",
    }.items():
        with pytest.raises(ConfigError, match=words):
            spec_from_config(config_path(FLASH), format=text)


def test_the_plain_model_runs(alone: Specs) -> None:
    require_runnable(alone(FLASH))


@pytest.mark.parametrize("name", [FLASH, SMALL_FP8, GLM])
def test_a_family_listed_as_planned_only_is_one_with_an_obstacle(
    name: str, alone: Specs, config_path: Path
) -> None:
    model_type = json.loads(pathlib.Path(config_path(name)).read_text())["model_type"]
    assert (model_type in RUN_TYPES) is alone(name).runnable
    assert (model_type in PLANNED_TYPES) is not alone(name).runnable


@pytest.mark.parametrize("name", [SMALL_FP8, GLM])
def test_missing_and_unknown_scales_are_named(
    published_headers: Published, config_path: Path, name: str
) -> None:
    headers = published_headers(name)
    scale = next(n for n in headers.tensors if n.endswith("experts.5.up_proj.weight_scale_inv"))
    weight = scale.removesuffix("_scale_inv")
    without = {n: h for n, h in headers.tensors.items() if n != scale}
    with pytest.raises(CheckpointError) as caught:
        spec_from_config(config_path(name), replace(headers, tensors=without))
    assert f"{weight} has dtype F8_E4M3, but {scale}" in str(caught.value)
    assert "/pub/model.safetensors" in str(caught.value)
    stray = scale.replace("up_proj", "uq_proj")
    extra = {**headers.tensors, stray: headers.tensors[scale]}
    with pytest.raises(CheckpointError) as caught:
        spec_from_config(config_path(name), replace(headers, tensors=extra))
    assert f"1 unknown tensors ({stray}, nearest known" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index_kpool": None}, "index_kpool is missing"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim = 64"),
        ({"n_group": 8}, "n_group = 8"),
        ({"indexer_types": ["shared"] * 45}, "indexer_types = 'shared', supported: full"),
        ({"layer_types": ["linear_attention"]}, "num_hidden_layers = 45"),
        ({"mlp_layer_types": ["hash"] * 45}, "mlp_layer_types = 'hash'"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
        ({"linear_lower_bound": 1.0}, "linear_lower_bound = 1.0"),
        ({"index_topk": 2047}, "index_topk = 2047"),
        ({"num_experts_per_tok": 289}, "num_experts_per_tok = 289"),
        ({"attention_bias": True}, "attention_bias = True"),
    ],
)
def test_glm_values_that_cannot_be(
    config_path: Path, tmp_path: Any, changes: dict[str, Any], words: str
) -> None:
    config = json.loads(pathlib.Path(config_path(GLM)).read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        spec_from_config(str(tmp_path / "config.json"))


def test_a_method_that_a_config_does_not_describe_needs_headers(
    config_path: Path, tmp_path: Any
) -> None:
    config = json.loads(pathlib.Path(config_path(FLASH)).read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"compressed-tensors.*--headers.*--format"):
        spec_from_config(str(tmp_path / "config.json"))
