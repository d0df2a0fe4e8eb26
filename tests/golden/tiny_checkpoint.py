"""Write a small randomised checkpoint of the hybrid sparse-attention family, the same everywhere.

Values come from torch's Mersenne Twister as uniform floats, which are exact on every CPU (its
normal generator is not), keyed by tensor name, and are rounded to bfloat16 so that a run in any
weight type starts from equal numbers. Fan-in scales keep every branch of the model alive: with the
usual initialisation the logits hardly depend on most of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, HIDDEN, STREAMS, LOW_RANK = 512, 64, 4, 16
QUERY_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 32
KEY_HEADS, VALUE_HEADS, LINEAR_DIM, CONV_KERNEL = 4, 12, 16, 4
EXPERTS, EXPERT_DIM = 14, 32
INDEX_HEADS, INDEX_DIM = 4, 16
NGRAM_HEADS, NGRAM_DIM, NGRAM_BASE, NGRAM_DIVISOR, TABLE_PARTS = 16, 64, 1000, 128, 4
EOS = 511
ATTENTION_EVERY = 4
SHARD_TENSORS = 80


@dataclass(frozen=True)
class Variant:
    """How the same weights are laid out on disk; `layers` alone changes the numbers."""

    layers: int = 8
    experts: str = "split"  # one tensor an expert, or "fused" banks
    prefix: str = "model."  # or "model.language_model." with a nested configuration
    max_position: int = 4096
    mtp: bool = True

    @property
    def name(self) -> str:
        nested = "-nested" if self.prefix != "model." else ""
        draft = "" if self.mtp else "-nomtp"
        return f"tiny-{self.layers}-{self.experts}-{self.max_position}{nested}{draft}"


def text_config(variant: Variant) -> dict[str, Any]:
    return {
        "model_type": "qwen4_exp_text",
        "architectures": ["Qwen4ExpForCausalLM"],
        "dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": variant.layers,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": variant.max_position,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        "linear_conv_kernel_dim": CONV_KERNEL,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_value_head_dim": LINEAR_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "output_gate_type": "sigmoid",
        "moe_intermediate_size": EXPERT_DIM,
        "shared_expert_intermediate_size": EXPERT_DIM,
        "num_experts_per_tok": 4,
        "num_experts": EXPERTS,
        "norm_topk_prob": True,
        "hc_count": STREAMS,
        "hc_lowrank": LOW_RANK,
        "ple_layer_ids": [2],
        "ple_embed_dim": NGRAM_DIM,
        "ple_conv_kernel_size": CONV_KERNEL,
        "ngram_size": 3,
        "heads_per_ngram": NGRAM_HEADS // 2,
        "ngram_vocab_size_base": NGRAM_BASE,
        "make_ngram_vocab_size_divisible_by": NGRAM_DIVISOR,
        "split_ngram_parts": TABLE_PARTS,
        "seed": 1234,
        "indexer_n_heads": INDEX_HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": INDEX_DIM,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "full_attention_interval": ATTENTION_EVERY,
        "eos_token_id": EOS,
        "pad_token_id": None,
        "bos_token_id": None,
        "mtp_num_hidden_layers": int(variant.mtp),
    }


def config(variant: Variant) -> dict[str, Any]:
    text = text_config(variant)
    if variant.prefix == "model.":
        return text
    return {
        "model_type": "qwen4_exp",
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "dtype": "float32",
        "text_config": text,
    }


def table_rows() -> int:
    """Rows of the n-gram table: the first primes from the base on, padded to the divisor."""
    sizes: list[int] = []
    candidate = NGRAM_BASE
    while len(sizes) < NGRAM_HEADS:
        if all(candidate % d for d in range(2, math.isqrt(candidate) + 1)):
            sizes.append(candidate)
        candidate += 1
    return -(-sum(sizes) // NGRAM_DIVISOR) * NGRAM_DIVISOR


def value(name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor of that name: uniform with the scale its role asks for, bfloat16 values."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    unit = torch.rand(shape, generator=generator) * 2 - 1
    if name.endswith("A_log"):
        out = unit * 2 - 1.5  # decays between 0.02 and 0.98 a token: long and short memories
    elif name.endswith("linear_attn.norm.weight"):
        out = 1 + 0.3 * unit
    elif "norm" in name or name.endswith("dt_bias"):
        out = 0.35 * unit
    elif "conv1d" in name:
        out = 0.5 * unit
    elif "ngram_embedding" in name:
        out = 0.85 * unit
    else:
        out = unit * math.sqrt(3 / shape[-1])
    return out.bfloat16().float()


def _residual(prefix: str, inject: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    wide = STREAMS * HIDDEN
    yield f"{prefix}.hc_norm.weight", (wide,)
    yield f"{prefix}.input_mix_weight_down.weight", (LOW_RANK, wide)
    yield f"{prefix}.input_mix_weight_up.weight", (wide, LOW_RANK)
    if inject:
        yield f"{prefix}.block_inject_weight.weight", (STREAMS, wide)


def _recurrent(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    values = VALUE_HEADS * LINEAR_DIM
    mixed = 2 * KEY_HEADS * LINEAR_DIM + values
    yield f"{prefix}.in_proj_qkv.weight", (mixed, HIDDEN)
    yield f"{prefix}.conv1d.weight", (mixed, 1, CONV_KERNEL)
    yield f"{prefix}.in_proj_z.weight", (values, HIDDEN)
    yield f"{prefix}.in_proj_b.weight", (VALUE_HEADS, HIDDEN)
    yield f"{prefix}.in_proj_a.weight", (VALUE_HEADS, HIDDEN)
    yield f"{prefix}.A_log", (VALUE_HEADS,)
    yield f"{prefix}.dt_bias", (VALUE_HEADS,)
    yield f"{prefix}.norm.weight", (LINEAR_DIM,)
    yield f"{prefix}.out_proj.weight", (HIDDEN, values)


def _attention(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.q_proj.weight", (QUERY_HEADS * 2 * HEAD_DIM, HIDDEN)
    yield f"{prefix}.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
    yield f"{prefix}.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
    yield f"{prefix}.o_proj.weight", (HIDDEN, QUERY_HEADS * HEAD_DIM)
    yield f"{prefix}.q_norm.weight", (HEAD_DIM,)
    yield f"{prefix}.k_norm.weight", (HEAD_DIM,)
    yield f"{prefix}.indexer.index_qk_proj.weight", ((INDEX_HEADS + 1) * INDEX_DIM, HIDDEN)
    yield f"{prefix}.indexer.q_layernorm.weight", (INDEX_DIM,)
    yield f"{prefix}.indexer.k_layernorm.weight", (INDEX_DIM,)


def _experts(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate.weight", (EXPERTS, HIDDEN)
    yield f"{prefix}.experts.gate_up_proj", (EXPERTS, 2 * EXPERT_DIM, HIDDEN)
    yield f"{prefix}.experts.down_proj", (EXPERTS, HIDDEN, EXPERT_DIM)
    yield f"{prefix}.shared_expert.gate_proj.weight", (EXPERT_DIM, HIDDEN)
    yield f"{prefix}.shared_expert.up_proj.weight", (EXPERT_DIM, HIDDEN)
    yield f"{prefix}.shared_expert.down_proj.weight", (HIDDEN, EXPERT_DIM)
    yield f"{prefix}.shared_expert_gate.weight", (1, HIDDEN)


def _ngram(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    wide = STREAMS * HIDDEN
    yield f"{prefix}.ple_embedding.ngram_embedding.weight", (table_rows(), NGRAM_DIM // NGRAM_HEADS)
    yield f"{prefix}.key_proj.weight", (wide, NGRAM_DIM)
    yield f"{prefix}.value_proj.weight", (HIDDEN, NGRAM_DIM)
    for role in ("key", "query", "conv"):
        yield f"{prefix}.norm_{role}.weight", (wide,)
    yield f"{prefix}.conv1d.weight", (wide, 1, CONV_KERNEL)


def _layer(prefix: str, attention: bool, ngram: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _residual(f"{prefix}.attn_hyper_connection", inject=True)
    yield from _residual(f"{prefix}.mlp_hyper_connection", inject=True)
    mixer = _attention if attention else _recurrent
    yield from mixer(f"{prefix}.{'self_attn' if attention else 'linear_attn'}")
    yield from _experts(f"{prefix}.mlp")
    if ngram:
        yield from _ngram(f"{prefix}.ple")


def _draft() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mtp.fc_embedding.weight", (HIDDEN, HIDDEN)
    yield "mtp.fc_hidden.weight", (HIDDEN, HIDDEN)
    yield "mtp.pre_fc_norm_embedding.weight", (HIDDEN,)
    yield "mtp.pre_fc_norm_hidden.weight", (STREAMS * HIDDEN,)
    yield from _residual("mtp.hyper_connection_mixer", inject=False)
    yield from _layer("mtp.layers.0", attention=True, ngram=False)


def tensors(variant: Variant) -> dict[str, Tensor]:
    """All tensors under the shortest names with fused experts: what the digest is taken of."""
    shapes = [("model.embed_tokens.weight", (VOCAB, HIDDEN)), ("lm_head.weight", (VOCAB, HIDDEN))]
    shapes += _residual("model.hyper_connection_mixer", inject=False)
    for layer in range(variant.layers):
        attention = (layer + 1) % ATTENTION_EVERY == 0
        shapes += _layer(f"model.layers.{layer}", attention, ngram=layer == 1)
    if variant.mtp:
        shapes += _draft()
    return {name: value(name, shape) for name, shape in shapes}


def digest(variant: Variant) -> str:
    """sha256 of the trunk's weights by name; layouts of the same weights share it."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors(variant).items()):
        if not name.startswith("mtp."):
            sha.update(name.encode() + tensor.numpy().tobytes())
    return sha.hexdigest()


def _on_disk(variant: Variant, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name.startswith("model."):
        name = variant.prefix + name.removeprefix("model.")
    stem = name.removesuffix(".weight")
    if name.endswith("ngram_embedding.weight"):
        for i, part in enumerate(tensor.chunk(TABLE_PARTS)):
            yield f"{stem}.shard_{i}.weight", part
    elif ".experts." in name and variant.experts == "split":
        for e, bank in enumerate(tensor):
            base = name.replace(".experts.", f".experts.{e}.")
            if base.endswith("gate_up_proj"):
                for role, half in zip(("gate", "up"), bank.chunk(2), strict=True):
                    yield f"{base.replace('gate_up', role)}.weight", half
            else:
                yield f"{base}.weight", bank
    else:
        yield name, tensor


def write(variant: Variant, folder: Path) -> Path:
    """Write config, generation config, weights in several files and their index to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(variant), indent=1))
    generation = {"eos_token_id": [EOS], "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    named = [pair for item in tensors(variant).items() for pair in _on_disk(variant, *item)]
    groups = [named[i : i + SHARD_TENSORS] for i in range(0, len(named), SHARD_TENSORS)]
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in group}, folder / file)
        weight_map |= dict.fromkeys((name for name, _ in group), file)
    total = sum(tensor.numel() * 4 for _, tensor in named)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return folder
