"""Adapter of the GLM5-Next family: `config.json` and headers to a `ModelSpec`.

Owns the meaning of the config keys; `glm5_next_tensors` owns the tensor names. Facts follow the
`glm5_next` model of transformers 5.24 and, for the draft layer that it lacks, vLLM's. For planning;
the engine has none of its mixers yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from placement.headers import CheckpointHeaders
from placement.models.assembly import checkpoint_dtype, end_tokens, text_section
from placement.models.config_reader import ConfigReader, bad_key
from placement.models.glm5_next_tensors import disk_tensors, draft_base
from placement.spec import (
    DenseSpec,
    KdaSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    ResidualKind,
    ResidualSpec,
)

FAMILY = "glm5_next"
MODEL_TYPES = ("glm5_next", "glm5_next_text")
RECURRENT = "linear_attention"
ATTENTION = ("indexed_attention", "deepseek_sparse_attention")
OBSTACLE = "its KDA, latent attention and mixed streams have no implementation in the engine"


def build_spec(
    name: str,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
    headers: CheckpointHeaders | None,
) -> ModelSpec:
    """The whole model; the same contract as that of the other families' adapters."""
    cfg, _ = text_section(config)
    cfg.text("hidden_act", "silu", ("silu",))
    if cfg.flag("attention_bias", False):
        raise bad_key("attention_bias", True, "false")
    residual = ResidualSpec(
        ResidualKind.MIXED_STREAMS,
        cfg.whole("hc_mult", 4, least=2),
        sinkhorn_steps=cfg.whole("hc_sinkhorn_iters", 20),
    )
    layers = _layers(cfg)
    drafts = _draft_layers(cfg, headers, len(layers))
    hidden, vocab = cfg.whole("hidden_size"), cfg.whole("vocab_size")
    disk = disk_tensors(hidden, vocab, residual, layers, drafts, config, headers)
    return ModelSpec(
        name=name,
        family=FAMILY,
        hidden=hidden,
        vocab=vocab,
        norm_eps=cfg.number("rms_norm_eps", 1e-5),
        max_context=cfg.whole("max_position_embeddings"),
        checkpoint_dtype=checkpoint_dtype(config, cfg, disk.tensors[0].pieces[0].name, headers),
        residual=residual,
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
    count = cfg.whole("num_hidden_layers")
    interval = [ATTENTION[0] if i % 4 == 3 else RECURRENT for i in range(count)]
    kinds = _listed(cfg, "layer_types", interval, (RECURRENT, *ATTENTION))
    # A layer that shares the selection of an earlier one has no indexer tensors of its own.
    _listed(cfg, "indexer_types", ["full"] * count, ("full",))
    dense = cfg.whole("first_k_dense_replace", 0, least=0)
    depths = ["dense" if i < dense else "sparse" for i in range(count)]
    channels = _listed(cfg, "mlp_layer_types", depths, ("dense", "sparse"))
    recurrent, attention = _kda(cfg), _attention(cfg)
    experts = _moe(cfg)
    clamp = cfg.number("swiglu_limit", 10.0)
    plain = DenseSpec(cfg.whole("intermediate_size"), clamp) if "dense" in channels else None
    layers = []
    for index, (kind, channel) in enumerate(zip(kinds, channels, strict=True)):
        mixer = recurrent if kind == RECURRENT else attention
        layers.append(LayerSpec(index, mixer, plain if plain and channel == "dense" else experts))
    return tuple(layers)


def _listed(
    cfg: ConfigReader, key: str, default: list[str], known: tuple[str, ...]
) -> tuple[str, ...]:
    """A list of one name a layer, each of them known."""
    names = cfg.get(key)
    if names is None:
        return tuple(default)
    if not isinstance(names, list) or len(names) != len(default):
        raise bad_key(key, names, f"a list of num_hidden_layers = {len(default)} names")
    for name in names:
        if name not in known:
            raise bad_key(key, name, ", ".join(known))
    return tuple(names)


def _kda(cfg: ConfigReader) -> KdaSpec:
    """The keys stand on their own, or in a section with names of their own."""
    nested = cfg.section("linear_attn_config")
    head_dim = cfg.whole("linear_head_dim", nested.get("head_dim") or 128)
    bound = cfg.get("linear_lower_bound") or nested.get("gate_lower_bound") or -5.0
    if type(bound) not in (int, float) or bound >= 0:
        raise bad_key("linear_lower_bound", bound, "a negative number")
    return KdaSpec(
        num_heads=cfg.whole("linear_num_heads", nested.get("num_heads") or 64),
        head_dim=head_dim,
        conv_kernel=cfg.whole(
            "linear_conv_kernel_dim", nested.get("short_conv_kernel_size") or 4, least=2
        ),
        gate_rank=head_dim,
        gate_lower_bound=float(bound),
    )


def _attention(cfg: ConfigReader) -> LatentAttentionSpec:
    if cfg.whole("qk_rope_head_dim", 0, least=0):
        raise bad_key("qk_rope_head_dim", cfg.get("qk_rope_head_dim"), "0")
    # transformers' class says 16 where the published checkpoint has 4, so it has to be stated.
    spec = LatentAttentionSpec(
        num_heads=cfg.whole("num_attention_heads"),
        query_rank=cfg.whole("q_lora_rank"),
        latent_dim=cfg.whole("kv_lora_rank"),
        query_dim=cfg.whole("qk_nope_head_dim"),
        value_dim=cfg.whole("v_head_dim"),
        index_heads=cfg.whole("index_n_heads"),
        index_dim=cfg.whole("index_head_dim"),
        block_tokens=cfg.whole("index_kpool"),
        budget_tokens=cfg.whole("index_topk"),
    )
    if spec.budget_tokens % spec.block_tokens:
        raise bad_key("index_topk", spec.budget_tokens, f"a multiple of {spec.block_tokens}")
    return spec


def _moe(cfg: ConfigReader) -> MoeSpec:
    for key in ("n_group", "topk_group"):
        if cfg.whole(key, 1) != 1:
            raise bad_key(key, cfg.get(key), "1")
    inner = cfg.whole("moe_intermediate_size")
    spec = MoeSpec(
        num_experts=cfg.whole("n_routed_experts"),
        top_k=cfg.whole("num_experts_per_tok"),
        intermediate=inner,
        shared_intermediate=inner * cfg.whole("n_shared_experts", 1),
        normalise_top_k=cfg.flag("norm_topk_prob", True),
        scoring="sigmoid",
        routed_scale=cfg.number("routed_scaling_factor", 1.0),
        shared_gated=False,
        clamp=cfg.number("swiglu_limit", 10.0),
    )
    if spec.top_k > spec.num_experts:
        limit = f"at most n_routed_experts {spec.num_experts}"
        raise bad_key("num_experts_per_tok", spec.top_k, limit)
    return spec


def _draft_layers(
    cfg: ConfigReader, headers: CheckpointHeaders | None, first: int
) -> tuple[LayerSpec, ...]:
    """The draft layer follows the model's layers under the next number."""
    count = cfg.whole("num_nextn_predict_layers", 0, least=0)
    if count > 1:
        raise bad_key("num_nextn_predict_layers", count, "0 or 1")
    if headers is not None:
        on_disk = any(draft_base(first) in name for name in headers.tensors)
        count = 1 if on_disk else 0
    return tuple(LayerSpec(index, _attention(cfg), _moe(cfg)) for index in range(count))
