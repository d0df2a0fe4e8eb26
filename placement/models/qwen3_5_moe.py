"""Adapter of the Qwen3.5-MoE family: `config.json` and headers to a `ModelSpec`.

Gated delta net and gated full attention, three to one, experts in every layer, plain residual.
Facts follow the `qwen3_5_moe` model of transformers 5.24. For planning; the engine has no plain
residual yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from placement.headers import CheckpointHeaders
from placement.models.assembly import (
    DiskTensors,
    checkpoint_dtype,
    end_tokens,
    find_prefix,
    quantisation_of,
    settle_tensors,
    text_section,
)
from placement.models.config_reader import ConfigReader, bad_key
from placement.models.qwen4_exp import gated_delta_spec, layer_types, moe_spec
from placement.models.qwen4_exp_tensors import PREFIXES, is_ignored
from placement.models.qwen_tensors import gated_attention, gated_delta, moe
from placement.models.rows import Names, by_rows, norm, whole
from placement.spec import (
    Axis,
    Component,
    GatedAttentionSpec,
    GatedDeltaSpec,
    LayerSpec,
    ModelSpec,
    ResidualKind,
    ResidualSpec,
    TensorSpec,
)

FAMILY = "qwen3_5_moe"
MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
DRAFT = "mtp."
RECURRENT = "linear_attention"
OBSTACLE = "its plain residual and full attention have no implementation in the engine"


def build_spec(
    name: str,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
    headers: CheckpointHeaders | None,
) -> ModelSpec:
    """The whole model; the same contract as that of the other families' adapters."""
    cfg, _ = text_section(config)
    cfg.text("hidden_act", "silu", ("silu",))
    layers, drafts = _layers(cfg), _draft_layers(cfg, headers)
    vocab = cfg.whole("vocab_size")
    disk = _disk_tensors(cfg, config, layers, drafts, headers)
    return ModelSpec(
        name=name,
        family=FAMILY,
        hidden=cfg.whole("hidden_size"),
        vocab=vocab,
        norm_eps=cfg.number("rms_norm_eps", 1e-6),
        max_context=cfg.whole("max_position_embeddings", 32768),
        checkpoint_dtype=checkpoint_dtype(config, cfg, disk.tensors[0].pieces[0].name, headers),
        residual=ResidualSpec(ResidualKind.PLAIN, 1),
        layers=layers,
        tensors=disk.tensors,
        draft_tensors=disk.draft_tensors,
        eos_token_ids=end_tokens(config, cfg, generation_config, vocab),
        total_tensors_on_disk=len(headers.tensors) if headers else disk.num_pieces,
        ignored_tensors=disk.ignored,
        draft_layers=drafts if disk.draft_tensors else (),
        scale_tensors=disk.scale_tensors,
        draft_scale_tensors=disk.draft_scale_tensors,
        obstacles=(OBSTACLE, *disk.format_obstacles),
        remarks=disk.remarks,
    )


def _layers(cfg: ConfigReader) -> tuple[LayerSpec, ...]:
    channel = moe_spec(cfg)
    recurrent = gated_delta_spec(cfg, default_gate="silu")
    attention = _attention(cfg)
    return tuple(
        LayerSpec(index, recurrent if kind == RECURRENT else attention, channel)
        for index, kind in enumerate(layer_types(cfg, (RECURRENT, "full_attention")))
    )


def _draft_layers(cfg: ConfigReader, headers: CheckpointHeaders | None) -> tuple[LayerSpec, ...]:
    count = cfg.whole("mtp_num_hidden_layers", 0, least=0)
    if headers is not None:
        on_disk = any(name.startswith(DRAFT + "layers.") for name in headers.tensors)
        count = max(count, 1) if on_disk else 0
    return tuple(LayerSpec(index, _attention(cfg), moe_spec(cfg)) for index in range(count))


def _attention(cfg: ConfigReader) -> GatedAttentionSpec:
    rope = cfg.section("rope_parameters")
    head_dim = cfg.whole("head_dim", 256)
    fraction = rope.number("partial_rotary_factor", cfg.number("partial_rotary_factor", 0.25))
    spec = GatedAttentionSpec(
        num_heads=cfg.whole("num_attention_heads"),
        num_kv_heads=cfg.whole("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * fraction),
        rope_theta=rope.number("rope_theta", cfg.number("rope_theta", 10000.0)),
    )
    if spec.num_heads % spec.num_kv_heads:
        limit = f"a multiple of num_key_value_heads {spec.num_kv_heads}"
        raise bad_key("num_attention_heads", spec.num_heads, limit)
    return spec


def _disk_tensors(
    cfg: ConfigReader,
    config: Mapping[str, Any],
    layers: tuple[LayerSpec, ...],
    drafts: tuple[LayerSpec, ...],
    headers: CheckpointHeaders | None,
) -> DiskTensors:
    prefix, head = find_prefix(PREFIXES, headers, "text_config" in config)
    names = Names(cfg.whole("hidden_size"), headers, quantisation_of(config) is not None)
    tied = ConfigReader(config).flag("tie_word_embeddings", cfg.flag("tie_word_embeddings", False))
    tensors = list(_top(names, cfg.whole("vocab_size"), prefix, head, tied))
    for layer in layers:
        base = f"{prefix}layers.{layer.index}."
        tensors += _layer(names, f"layers.{layer.index}.", base, layer, layer.index)
    draft_tensors = [
        replace(tensor, component=Component.MTP) for tensor in _draft(names, drafts, len(layers))
    ]

    def ignores(name: str) -> bool:
        return is_ignored(name, tied, head)

    return settle_tensors(tensors, draft_tensors, headers, config, ignores)


def _top(names: Names, vocab: int, prefix: str, head: str, tied: bool) -> Iterator[TensorSpec]:
    shape, split = (vocab, names.hidden), by_rows(Axis.VOCAB, 1, vocab)
    embed = prefix + "embed_tokens.weight"
    yield whole("embed", embed, shape, split, Component.EMBEDDING)
    yield whole("head", embed if tied else head, shape, split, Component.EMBEDDING)
    yield norm("final_norm", prefix + "norm.weight", names.hidden)


def _layer(
    names: Names, role: str, base: str, layer: LayerSpec, expert_layer: int
) -> Iterator[TensorSpec]:
    yield norm(role + "mixer_norm", base + "input_layernorm.weight", names.hidden)
    yield norm(role + "channel_norm", base + "post_attention_layernorm.weight", names.hidden)
    if isinstance(layer.mixer, GatedDeltaSpec):
        yield from gated_delta(names, role + "mixer.", base + "linear_attn.", layer.mixer)
    if isinstance(layer.mixer, GatedAttentionSpec):
        yield from gated_attention(names, role + "mixer.", base + "self_attn.", layer.mixer)
    yield from moe(names, role + "channel.", base + "mlp.", layer.moe, expert_layer)


def _draft(
    names: Names, drafts: tuple[LayerSpec, ...], first_expert_layer: int
) -> Iterator[TensorSpec]:
    if not drafts:
        return
    yield whole("draft.fc", DRAFT + "fc.weight", (names.hidden, 2 * names.hidden))
    yield norm("draft.norm_embedding", DRAFT + "pre_fc_norm_embedding.weight", names.hidden)
    yield norm("draft.norm_hidden", DRAFT + "pre_fc_norm_hidden.weight", names.hidden)
    yield norm("draft.final_norm", DRAFT + "norm.weight", names.hidden)
    for layer in drafts:
        role, base = f"draft.layers.{layer.index}.", f"{DRAFT}layers.{layer.index}."
        yield from _layer(names, role, base, layer, first_expert_layer + layer.index)
