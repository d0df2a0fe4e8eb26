"""Adapter of the Qwen4-Exp family: `config.json` and headers to a `ModelSpec`.

Owns the meaning of the config keys; `qwen4_exp_tensors` owns the tensor names. Facts follow the
`qwen4_exp` model of transformers 5.24 (configuration and modeling files).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from placement.errors import CheckpointError
from placement.headers import CheckpointHeaders
from placement.models.assembly import checkpoint_dtype, end_tokens, text_section
from placement.models.config_reader import ConfigReader, bad_key
from placement.models.qwen4_exp_tensors import disk_tensors
from placement.ngram_hash import head_offsets, head_vocab_sizes, layer_multipliers
from placement.spec import (
    GatedDeltaSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    NgramSpec,
    ResidualKind,
    ResidualSpec,
    SparseAttentionSpec,
)

FAMILY = "qwen4_exp"
MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
DEFAULT_SEED = 1234  # of the n-gram hash, also when the key is null
# Statistics of the draft head's hidden norm. Shapes can't tell: implementations differ, and the
# official ones span all streams, so a checkpoint trained the other way has to say it.
HIDDEN_NORM = "mtp_pre_fc_norm_hidden"
RECURRENT, ATTENTION = "linear_attention", ("full_attention", "indexed_attention")


def build_spec(
    name: str,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
    headers: CheckpointHeaders | None,
) -> ModelSpec:
    """The whole model. Without headers: fused experts and the names of a fresh export.

    Raises CheckpointError for a config value that isn't supported and for tensors on disk that
    don't agree with the config.
    """
    cfg, _ = text_section(config)
    _refuse_unsupported(cfg)
    layers = _layers(cfg)
    drafts = _draft_layers(cfg, headers)
    vocab, hidden = cfg.whole("vocab_size"), cfg.whole("hidden_size")
    residual = _residual(cfg)
    tied = ConfigReader(config).flag("tie_word_embeddings", cfg.flag("tie_word_embeddings", False))
    disk = disk_tensors(hidden, vocab, residual, layers, drafts, config, tied, headers)
    return ModelSpec(
        name=name,
        family=FAMILY,
        hidden=hidden,
        vocab=vocab,
        norm_eps=cfg.number("rms_norm_eps", 1e-6),
        max_context=cfg.whole("max_position_embeddings", 32768),
        checkpoint_dtype=checkpoint_dtype(config, cfg, disk.tensors[0].pieces[0].name, headers),
        residual=residual,
        layers=layers,
        tensors=disk.tensors,
        draft_tensors=disk.draft_tensors,
        eos_token_ids=end_tokens(config, cfg, generation_config, vocab),
        total_tensors_on_disk=len(headers.tensors) if headers else disk.num_pieces,
        ignored_tensors=disk.ignored,
        draft_layers=drafts if disk.draft_tensors else (),
        draft_norm_per_stream=cfg.text(HIDDEN_NORM, "full", ("full", "per_stream")) != "full",
        scale_tensors=disk.scale_tensors,
        draft_scale_tensors=disk.draft_scale_tensors,
        obstacles=disk.format_obstacles,
        remarks=disk.remarks,
    )


def _refuse_unsupported(cfg: ConfigReader) -> None:
    cfg.text("hidden_act", "silu", ("silu",))
    if cfg.flag("attention_bias", False):
        raise bad_key("attention_bias", True, "false")
    if cfg.get("rope_scaling") is not None:
        raise bad_key("rope_scaling", cfg.get("rope_scaling"), "null (rope_parameters default)")
    rope = cfg.section("rope_parameters")
    rope.text("rope_type", "default", ("default", "mrope"))


def _layers(cfg: ConfigReader) -> tuple[LayerSpec, ...]:
    types = layer_types(cfg, (RECURRENT, *ATTENTION))
    channel = moe_spec(cfg)
    recurrent = (
        gated_delta_spec(cfg, cfg.get("hidden_act") or "silu") if RECURRENT in types else None
    )
    attention = _sparse_attention(cfg) if set(types) & set(ATTENTION) else None
    ngrams = _ngrams(cfg, len(types))
    layers = []
    for index, kind in enumerate(types):
        mixer = recurrent if kind == RECURRENT else attention
        assert mixer is not None  # built above whenever its kind occurs
        layers.append(LayerSpec(index, mixer, channel, ngrams.get(index)))
    return tuple(layers)


def layer_types(cfg: ConfigReader, known: tuple[str, ...]) -> tuple[str, ...]:
    """The mixer names of all layers: listed, or the second of `known` at every interval."""
    count = cfg.whole("num_hidden_layers")
    types = cfg.get("layer_types")
    if types is None:
        interval = cfg.whole("full_attention_interval", 4)
        return tuple(known[1] if (i + 1) % interval == 0 else known[0] for i in range(count))
    if not isinstance(types, list) or len(types) != count:
        raise bad_key("layer_types", types, f"a list of num_hidden_layers = {count} names")
    for kind in types:
        if kind not in known:
            raise bad_key("layer_types", kind, ", ".join(known))
    return tuple(types)


def gated_delta_spec(cfg: ConfigReader, default_gate: str) -> GatedDeltaSpec:
    spec = GatedDeltaSpec(
        num_key_heads=cfg.whole("linear_num_key_heads", 16),
        num_value_heads=cfg.whole("linear_num_value_heads", 32),
        key_dim=cfg.whole("linear_key_head_dim", 128),
        value_dim=cfg.whole("linear_value_head_dim", 128),
        conv_kernel=cfg.whole("linear_conv_kernel_dim", 4, least=2),
        gate_activation=cfg.text("output_gate_type", default_gate, ("sigmoid", "silu")),
    )
    if spec.num_value_heads % spec.num_key_heads:
        limit = f"a multiple of linear_num_key_heads {spec.num_key_heads}"
        raise bad_key("linear_num_value_heads", spec.num_value_heads, limit)
    return spec


def _sparse_attention(cfg: ConfigReader) -> SparseAttentionSpec:
    rope = cfg.section("rope_parameters")
    head_dim = cfg.whole("head_dim", 256)
    fraction = rope.number("partial_rotary_factor", cfg.number("partial_rotary_factor", 1.0))
    spec = SparseAttentionSpec(
        num_heads=cfg.whole("num_attention_heads"),
        num_kv_heads=cfg.whole("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * fraction),
        rope_theta=rope.number("rope_theta", cfg.number("rope_theta", 10000.0)),
        index_heads=cfg.whole("indexer_n_heads"),
        index_dim=cfg.whole("indexer_head_dim"),
        block_tokens=cfg.whole("indexer_compress_ratio"),
        budget_tokens=cfg.whole("indexer_budget"),
    )
    if cfg.whole("indexer_kv_heads") != 1:
        raise bad_key("indexer_kv_heads", cfg.get("indexer_kv_heads"), "1")
    if spec.num_heads % spec.num_kv_heads:
        limit = f"a multiple of num_key_value_heads {spec.num_kv_heads}"
        raise bad_key("num_attention_heads", spec.num_heads, limit)
    if spec.budget_tokens % spec.block_tokens:
        limit = f"a multiple of indexer_compress_ratio {spec.block_tokens}"
        raise bad_key("indexer_budget", spec.budget_tokens, limit)
    if spec.rotary_dim % 2 or not 0 < spec.rotary_dim <= min(head_dim, spec.index_dim):
        limit = f"an even share of head_dim {head_dim}, at most indexer_head_dim {spec.index_dim}"
        raise bad_key("partial_rotary_factor", fraction, limit)
    return spec


def moe_spec(cfg: ConfigReader) -> MoeSpec:
    spec = MoeSpec(
        num_experts=cfg.whole("num_experts"),
        top_k=cfg.whole("num_experts_per_tok"),
        intermediate=cfg.whole("moe_intermediate_size"),
        shared_intermediate=cfg.whole("shared_expert_intermediate_size"),
        normalise_top_k=cfg.flag("norm_topk_prob", True),
    )
    if spec.top_k > spec.num_experts:
        limit = f"at most num_experts {spec.num_experts}"
        raise bad_key("num_experts_per_tok", spec.top_k, limit)
    return spec


def _residual(cfg: ConfigReader) -> ResidualSpec:
    streams, rank = cfg.whole("hc_count", 4, least=2), cfg.whole("hc_lowrank", 320)
    return ResidualSpec(ResidualKind.GATED_STREAMS, streams, rank)


def _ngrams(cfg: ConfigReader, num_layers: int) -> dict[int, NgramSpec]:
    """Layer index -> n-gram embedding. The ids in the config are one-based."""
    ids = cfg.get("ple_layer_ids") or []
    if not isinstance(ids, list) or not all(
        type(one) is int and 1 <= one <= num_layers for one in ids
    ):
        raise bad_key("ple_layer_ids", ids, f"a list of layer numbers from 1 to {num_layers}")
    return {one - 1: _ngram(cfg, ordinal) for ordinal, one in enumerate(sorted(set(ids)))}


def _ngram(cfg: ConfigReader, ordinal: int) -> NgramSpec:
    vocab = cfg.whole("vocab_size")
    size = cfg.whole("ngram_size", 3, least=2)
    heads = cfg.whole("heads_per_ngram", 8)
    embed_dim = cfg.whole("ple_embed_dim", cfg.whole("hidden_size"))
    num_heads = (size - 1) * heads
    if embed_dim % num_heads:
        raise bad_key("ple_embed_dim", embed_dim, f"a multiple of {num_heads} n-gram heads")
    ends = cfg.token_ids("eos_token_id", vocab)
    if not ends:
        raise CheckpointError("config.json: eos_token_id is missing; n-gram embeddings need it")
    sizes = head_vocab_sizes(cfg.whole("ngram_vocab_size_base", 20_000_000), num_heads, ordinal)
    divisor = cfg.whole("make_ngram_vocab_size_divisible_by", 128)
    return NgramSpec(
        ngram_size=size,
        heads_per_ngram=heads,
        embed_dim=embed_dim,
        conv_kernel=cfg.whole("ple_conv_kernel_size", 4, least=2),
        eos_token_id=ends[0],
        multipliers=layer_multipliers(
            vocab, size, ordinal, cfg.whole("seed", DEFAULT_SEED, least=0)
        ),
        head_vocab_sizes=sizes,
        head_offsets=head_offsets(sizes),
        table_rows=ceil(sum(sizes) / divisor) * divisor,
    )


def _draft_layers(cfg: ConfigReader, headers: CheckpointHeaders | None) -> tuple[LayerSpec, ...]:
    """Layers of the draft head: sparse attention with MoE. None where no tensor of it exists."""
    count = cfg.whole("mtp_num_hidden_layers", 0, least=0)
    if headers is not None:
        on_disk = any(name.startswith("mtp.layers.") for name in headers.tensors)
        count = max(count, 1) if on_disk else 0
    if count == 0:
        return ()
    attention, channel = _sparse_attention(cfg), moe_spec(cfg)
    return tuple(LayerSpec(index, attention, channel) for index in range(count))
