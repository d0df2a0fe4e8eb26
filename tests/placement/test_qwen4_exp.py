"""The Qwen4-Exp adapter: roles, layouts, prefixes, and how a broken checkpoint is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from placement.errors import CheckpointError
from placement.headers import CheckpointHeaders, TensorHeader, read_header_dump
from placement.models.qwen4_exp import build_spec
from placement.models.registry import load_model_spec, spec_from_config
from placement.spec import Component, DTypeRule, GatedDeltaSpec, MixerKind, ModelSpec

Loaded = tuple[ModelSpec, CheckpointHeaders]
MakeHeaders = Callable[..., CheckpointHeaders]
SITES = {f"{site}.{p}" for site in ("mixer_site", "channel_site")
         for p in ("norm", "down", "up", "inject")}  # fmt: skip
CHANNEL = {f"channel.{p}" for p in (
    "router", "shared_gate", "shared_gate_proj", "shared_up_proj", "shared_down",
    "experts_gate_up", "experts_down")}  # fmt: skip
GATED_DELTA = {f"mixer.{p}" for p in (
    "qkv", "conv", "z", "b", "a", "a_log", "dt_bias", "norm", "out")}  # fmt: skip
ATTENTION = {f"mixer.{p}" for p in (
    "q", "k", "v", "o", "q_norm", "k_norm", "index_qk", "index_q_norm",
    "index_k_norm")}  # fmt: skip
NGRAM = {f"ngram.{p}" for p in (
    "key", "value", "norm_key", "norm_query", "norm_conv", "conv", "table",
    "multipliers", "vocab_sizes", "offsets")}  # fmt: skip
FINAL = {f"final_mixer.{p}" for p in ("norm", "down", "up")}
DRAFT = {"fc_embedding", "fc_hidden", "norm_embedding", "norm_hidden"} | FINAL


def expected_roles(spec: ModelSpec) -> set[str]:
    roles = {"embed", "head"} | FINAL
    for layer in spec.layers:
        recurrent = layer.mixer_kind is MixerKind.GATED_DELTA
        parts = SITES | CHANNEL | (GATED_DELTA if recurrent else ATTENTION)
        parts |= NGRAM if layer.ngram else set()
        roles |= {f"layers.{layer.index}.{part}" for part in parts}
    return roles


def test_roles_of_the_embedded_checkpoint_are_complete(tiny: Loaded) -> None:
    spec, _ = tiny
    roles = [tensor.role for tensor in spec.tensors]
    assert len(set(roles)) == len(roles)
    assert set(roles) == expected_roles(spec)
    drafts = {f"draft.{part}" for part in DRAFT}
    drafts |= {f"draft.layers.0.{part}" for part in SITES | CHANNEL | ATTENTION}
    assert {tensor.role for tensor in spec.draft_tensors} == drafts
    assert {tensor.component for tensor in spec.draft_tensors} == {Component.MTP}


def test_every_tensor_on_disk_is_accounted_for_once(tiny: Loaded) -> None:
    spec, headers = tiny
    used = Counter(p.name for t in (*spec.tensors, *spec.draft_tensors) for p in t.pieces)
    assert set(used) == set(headers.tensors)
    assert set(used.values()) == {1}
    assert spec.total_tensors_on_disk == len(headers.tensors) == 561
    for tensor in (*spec.tensors, *spec.draft_tensors):
        assert sum(prod(p.shape) for p in tensor.pieces) == prod(tensor.shape), tensor.role


def test_embedded_model_values(tiny: Loaded) -> None:
    spec, _ = tiny
    assert spec.name == "tiny-flash-next"
    assert spec.eos_token_ids == (4089, 4087)
    assert spec.checkpoint_dtype == "bfloat16"
    assert spec.max_context == 32768
    kinds = [layer.mixer_kind for layer in spec.layers]
    assert [k is MixerKind.SPARSE_ATTENTION for k in kinds] == [False, False, False, True] * 2
    ngram = spec.layers[1].ngram
    assert ngram is not None
    assert (ngram.eos_token_id, ngram.table_rows, ngram.conv_window) == (4087, 32256, 9)
    assert [layer.ngram is None for layer in spec.layers] == [True, False] + [True] * 6


def test_norms_and_decay_are_kept_in_float32(tiny: Loaded) -> None:
    for tensor in tiny[0].tensors:
        last = tensor.role.rsplit(".", 1)[-1]
        is_norm = "norm" in last or last in ("a_log", "dt_bias")
        is_constant = last in ("multipliers", "vocab_sizes", "offsets")
        wanted = DTypeRule.FLOAT32 if is_norm else DTypeRule.WEIGHT
        assert tensor.dtype is (DTypeRule.INT64 if is_constant else wanted), tensor.role


def test_real_geometry(real: Loaded) -> None:
    spec, headers = real
    assert len(spec.layers) == 48
    assert sum(layer.mixer_kind is MixerKind.SPARSE_ATTENTION for layer in spec.layers) == 12
    main = sum(prod(tensor.shape) for tensor in spec.tensors)
    draft = sum(prod(tensor.shape) for tensor in spec.draft_tensors)
    # Published size: 176.944 B parameters without, 2.607 B in the draft head.
    assert round(main / 1e9, 3) == 176.944
    assert round(draft / 1e9, 3) == 2.607
    assert len(spec.draft_tensors) == 31
    assert spec.ignored_tensors == ("model.visual.blocks.0.attn.qkv.weight",)
    table = next(t for t in spec.tensors if t.role == "layers.1.ngram.table")
    assert table.shape == (320001536, 160)
    assert len(table.pieces) == 128
    assert table.pieces[1].origin == (2500012, 0)
    assert headers.tensors[table.pieces[0].name].shape == (2500012, 160)


def test_config_alone_gives_the_same_model(
    real: Loaded, real_config: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(real_config))
    alone = spec_from_config(str(path))
    assert alone.layers == real[0].layers
    assert [(t.role, t.shape, t.split) for t in alone.tensors] == [
        (t.role, t.shape, t.split) for t in real[0].tensors
    ]
    assert alone.eos_token_ids == (248044,)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("per_expert", [True, False])
def test_prefixes_and_expert_layouts(
    tiny_config: dict[str, Any], make_headers: MakeHeaders, prefix: str, per_expert: bool
) -> None:
    def rename(name: str) -> str:
        if name == "lm_head.weight" and prefix == "language_model.model.":
            return "language_model.lm_head.weight"
        return prefix + name.removeprefix("model.") if name.startswith("model.") else name

    headers = make_headers(tiny_config, per_expert=per_expert, shards=4, rename=rename)
    spec = build_spec("t", tiny_config, None, headers)
    experts = next(t for t in spec.tensors if t.role == "layers.2.channel.experts_gate_up")
    assert len(experts.pieces) == (28 if per_expert else 1)
    assert experts.pieces[0].name.startswith(prefix + "layers.2.mlp.experts.")
    assert {p.name for t in (*spec.tensors, *spec.draft_tensors) for p in t.pieces} == set(
        headers.tensors
    )


def test_per_expert_pieces_put_gate_above_up(tiny: Loaded) -> None:
    experts = next(t for t in tiny[0].tensors if t.role == "layers.0.channel.experts_gate_up")
    gate, up = experts.pieces[4:6]
    assert gate.name.endswith("experts.2.gate_proj.weight")
    assert (gate.origin, up.origin) == ((2, 0, 0), (2, 64, 0))


def test_table_in_one_tensor(tiny_config: dict[str, Any], make_headers: MakeHeaders) -> None:
    spec = build_spec("t", tiny_config, None, make_headers(tiny_config, shards=1))
    table = next(t for t in spec.tensors if t.role == "layers.1.ngram.table")
    assert [p.name.rsplit(".", 2)[1:] for p in table.pieces] == [["ngram_embedding", "weight"]]


def test_layers_follow_the_interval_without_layer_types(tiny_config: dict[str, Any]) -> None:
    config = {**tiny_config, "layer_types": None, "full_attention_interval": 2}
    kinds = [layer.mixer_kind for layer in build_spec("t", config, None, None).layers]
    assert [k is MixerKind.SPARSE_ATTENTION for k in kinds] == [False, True] * 4


def test_full_attention_means_the_indexed_kind(tiny_config: dict[str, Any]) -> None:
    types = [t.replace("indexed", "full") for t in tiny_config["layer_types"]]
    renamed = build_spec("t", {**tiny_config, "layer_types": types}, None, None)
    assert renamed.layers == build_spec("t", tiny_config, None, None).layers


def test_output_gate_falls_back_to_the_activation(tiny_config: dict[str, Any]) -> None:
    config = {key: value for key, value in tiny_config.items() if key != "output_gate_type"}
    mixer = build_spec("t", config, None, None).layers[0].mixer
    assert isinstance(mixer, GatedDeltaSpec)
    assert mixer.gate_activation == "silu"


def test_end_tokens_and_ngram_end_are_told_apart(tiny_config: dict[str, Any]) -> None:
    config = {**tiny_config, "eos_token_id": [7, 8]}
    spec = build_spec("t", config, {"eos_token_id": [9, 7]}, None)
    assert spec.eos_token_ids == (9, 7)
    assert spec.layers[1].ngram is not None
    assert spec.layers[1].ngram.eos_token_id == 7
    assert build_spec("t", config, None, None).eos_token_ids == (7, 8)


def test_tied_head_reads_the_embedding(
    tiny_config: dict[str, Any], make_headers: MakeHeaders
) -> None:
    config = {**tiny_config, "tie_word_embeddings": True}
    spec = build_spec("t", config, None, make_headers(config))
    embed, head = spec.tensors[:2]
    assert (embed.role, head.role) == ("embed", "head")
    assert head.pieces == embed.pieces
    stored = make_headers(config, extra={"lm_head.weight": ("BF16", (4096, 192))})
    assert build_spec("t", config, None, stored).ignored_tensors == ("lm_head.weight",)


def test_checkpoint_without_draft_head(
    tiny_config: dict[str, Any], make_headers: MakeHeaders
) -> None:
    headers = make_headers({**tiny_config, "mtp_num_hidden_layers": 0})
    spec = build_spec("t", tiny_config, None, headers)
    assert spec.draft_tensors == ()
    assert spec.draft_layers == ()


def test_unused_draft_tensor_is_dropped(
    tiny_config: dict[str, Any], make_headers: MakeHeaders
) -> None:
    name = "mtp.hyper_connection_mixer.block_inject_weight.weight"
    headers = make_headers(tiny_config, extra={name: ("BF16", (4, 768))})
    assert build_spec("t", tiny_config, None, headers).ignored_tensors == (name,)


def altered(
    headers: CheckpointHeaders, changes: dict[str, TensorHeader | None]
) -> CheckpointHeaders:
    """Headers with some tensors replaced, added, or (None) removed."""
    tensors: dict[str, TensorHeader | None] = {**headers.tensors, **changes}
    return replace(headers, tensors={n: h for n, h in tensors.items() if h is not None})


def refusal(config: dict[str, Any], headers: CheckpointHeaders | None) -> str:
    with pytest.raises(CheckpointError) as caught:
        build_spec("t", config, None, headers)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_tensor_is_named(tiny: Loaded, tiny_config: dict[str, Any]) -> None:
    name = "model.layers.3.self_attn.k_proj.weight"
    message = refusal(tiny_config, altered(tiny[1], {name: None}))
    assert f"1 missing tensors ({name})" in message


def test_renamed_tensor_is_named_with_the_nearest(
    tiny: Loaded, tiny_config: dict[str, Any]
) -> None:
    name, wrong = "model.layers.3.self_attn.k_proj.weight", "model.layers.3.self_attn.key.weight"
    headers = altered(tiny[1], {name: None, wrong: tiny[1].tensors[name]})
    assert f"1 unknown tensors ({wrong}, nearest known {name})" in refusal(tiny_config, headers)


def test_unknown_tensor_is_named_and_many_are_cut_short(
    tiny: Loaded, tiny_config: dict[str, Any]
) -> None:
    header = tiny[1].tensors["lm_head.weight"]
    extra = {f"model.layers.0.extra_{i}.weight": header for i in range(9)}
    message = refusal(tiny_config, altered(tiny[1], extra))
    assert "9 unknown tensors (model.layers.0.extra_0.weight" in message
    assert message.endswith("and 4 more)")


def test_missing_expert_and_missing_shard(tiny: Loaded, tiny_config: dict[str, Any]) -> None:
    expert = "model.layers.5.mlp.experts.13.up_proj.weight"
    assert expert in refusal(tiny_config, altered(tiny[1], {expert: None}))
    shard = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_3.weight"
    message = refusal(tiny_config, altered(tiny[1], {shard: None}))
    assert shard in message
    assert "24192 rows in 3 shards" in message
    assert "32256" in message


def test_no_embedding(tiny: Loaded, tiny_config: dict[str, Any]) -> None:
    message = refusal(tiny_config, altered(tiny[1], {"model.embed_tokens.weight": None}))
    assert "no embedding" in message
    assert "model.embed_tokens.weight" in message


def test_wrong_shape_and_dtype(tiny: Loaded, tiny_config: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.gate.weight"
    header = tiny[1].tensors[name]
    message = refusal(tiny_config, altered(tiny[1], {name: replace(header, shape=(13, 192))}))
    assert name in message
    assert "[13, 192], config.json says [14, 192]" in message
    message = refusal(tiny_config, altered(tiny[1], {name: replace(header, dtype="I64")}))
    assert f"{name} has dtype I64" in message


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U8", "I32"])
def test_quantised_weights_are_refused(
    tiny: Loaded, tiny_config: dict[str, Any], dtype: str
) -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    header = replace(tiny[1].tensors[name], dtype=dtype)
    message = refusal(tiny_config, altered(tiny[1], {name: header}))
    for word in (name, dtype, "BF16, F16, F32"):
        assert word in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": 0}, ["hidden_size = 0"]),
        ({"hidden_size": "192"}, ["hidden_size = '192'"]),
        ({"num_experts": True}, ["num_experts = True"]),
        ({"num_experts_per_tok": 15}, ["num_experts_per_tok = 15", "14"]),
        ({"linear_num_value_heads": 13}, ["linear_num_value_heads = 13", "multiple"]),
        ({"num_key_value_heads": 5}, ["num_attention_heads = 12", "5"]),
        ({"indexer_kv_heads": 2}, ["indexer_kv_heads = 2"]),
        ({"indexer_n_heads": None}, ["indexer_n_heads is missing"]),
        ({"indexer_budget": 255}, ["indexer_budget = 255", "4"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "silu"]),
        ({"output_gate_type": "tanh"}, ["output_gate_type = 'tanh'"]),
        ({"attention_bias": True}, ["attention_bias = True"]),
        ({"layer_types": ["linear_attention"]}, ["layer_types", "num_hidden_layers = 8"]),
        ({"layer_types": ["sliding"] * 8}, ["layer_types = 'sliding'", "linear_attention"]),
        ({"ple_layer_ids": [9]}, ["ple_layer_ids = [9]", "1 to 8"]),
        ({"ple_embed_dim": 129}, ["ple_embed_dim = 129", "8"]),
        ({"eos_token_id": None}, ["eos_token_id is missing"]),
        ({"eos_token_id": 4096}, ["eos_token_id = 4096", "4096"]),
        ({"hc_count": 1}, ["hc_count = 1"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps = -1.0"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["rope_type = 'yarn'", "default"]),
        ({"rope_parameters": {"partial_rotary_factor": 2.0}}, ["partial_rotary_factor = 2.0"]),
        ({"rope_scaling": {"factor": 4}}, ["rope_scaling"]),
        ({"dtype": "float8"}, ["dtype = 'float8'"]),
    ],
)
def test_config_values_that_cannot_be(
    tiny_config: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    message = refusal({**tiny_config, **changes}, None)
    for word in ("config.json", *words):
        assert word in message


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_unknown_model_type_lists_what_runs_and_what_can_only_be_planned(tiny_copy: Path) -> None:
    rewrite(tiny_copy / "config.json", model_type="foo_next")
    expected = (
        r"model_type 'foo_next' is not supported; can be run: qwen4_exp, qwen4_exp_text; "
        r"can only be planned: glm5_next, glm5_next_text, qwen3_5_moe, qwen3_5_moe_text$"
    )
    with pytest.raises(CheckpointError, match=expected):
        load_model_spec(str(tiny_copy))


def test_a_config_that_claims_quantised_weights_beside_plain_ones_is_remarked(
    tiny_copy: Path,
) -> None:
    rewrite(tiny_copy / "config.json", quantization_config={"quant_method": "fp8"})
    spec, _ = load_model_spec(str(tiny_copy))
    assert spec.remarks == ("config.json claims quantisation fp8, tensors are plain floats",)
    assert spec.runnable


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_broken_json_files(tiny_copy: Path, file: str) -> None:
    (tiny_copy / file).write_text("{nope")
    with pytest.raises(CheckpointError, match=rf"{file}: bad JSON"):
        load_model_spec(str(tiny_copy))


def test_generation_config_is_optional(tiny_copy: Path) -> None:
    (tiny_copy / "generation_config.json").unlink()
    assert load_model_spec(str(tiny_copy))[0].eos_token_ids == (4087,)


def test_config_with_a_header_dump(
    tiny_config: dict[str, Any], make_headers: MakeHeaders, tmp_path: Path
) -> None:
    headers = make_headers(tiny_config, per_expert=True, shards=4)
    dump = {n: {"dtype": h.dtype, "shape": list(h.shape)} for n, h in headers.tensors.items()}
    config, dumped = tmp_path / "config.json", tmp_path / "headers.json"
    config.write_text(json.dumps(tiny_config))
    dumped.write_text(json.dumps({"__metadata__": {}, **dump}))
    read = read_header_dump(str(dumped))
    spec = spec_from_config(str(config), read)
    assert spec.tensors == build_spec("t", tiny_config, None, headers).tensors
    assert {n: (h.offset, h.nbytes) for n, h in read.tensors.items()} == {
        n: (h.offset, h.nbytes) for n, h in headers.tensors.items()
    }
    dumped.write_text(json.dumps({**dump, "lm_head.weight": {"dtype": "Q9", "shape": [1]}}))
    with pytest.raises(CheckpointError, match=r"headers.json: lm_head.weight: "):
        read_header_dump(str(dumped))
