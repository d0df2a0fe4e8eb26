"""Model directories and headers for tests of placement; writes safetensors files by hand."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from placement.headers import DTYPE_BITS, CheckpointHeaders, TensorHeader
from placement.models.qwen4_exp import build_spec
from placement.models.registry import load_model_spec, spec_from_config
from placement.spec import DTypeRule, ModelSpec, TensorSpec

ModelAndHeaders = tuple[ModelSpec, CheckpointHeaders]
Entries = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape

REPO = Path(__file__).resolve().parents[2]
REAL_TEXT = {
    "model_type": "qwen4_exp_text", "vocab_size": 248320, "hidden_size": 2560,
    "num_hidden_layers": 48, "num_attention_heads": 24, "num_key_value_heads": 2,
    "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "output_gate_type": "sigmoid", "hidden_act": "silu",
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640, "norm_topk_prob": True, "hc_count": 4,
    "hc_lowrank": 320, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128,
    "indexer_budget": 2048, "indexer_compress_ratio": 4, "ple_layer_ids": [2],
    "ple_embed_dim": 2560, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20000000, "make_ngram_vocab_size_divisible_by": 128,
    "seed": None, "split_ngram_parts": 128, "eos_token_id": 248044, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
    "mtp_num_hidden_layers": 1, "dtype": "bfloat16",
}  # fmt: skip


def header_entries(entries: Entries) -> dict[str, Any]:
    """safetensors header entries with the tensors one after the other."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in entries.items():
        end = at + prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return header


def write_raw(path: Path, header: bytes, data_bytes: int) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data_bytes))


@pytest.fixture
def write_file() -> Callable[[Path, Entries], None]:
    """Writes a safetensors file of zeros with these tensors."""

    def write(path: Path, entries: Entries) -> None:
        header = header_entries(entries)
        size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        write_raw(path, json.dumps(header).encode(), size)

    return write


@pytest.fixture
def write_header() -> Callable[[Path, bytes, int], None]:
    """Writes a safetensors file with this header text and so many zero bytes of data."""
    return write_raw


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """An empty model directory: a config.json and nothing else."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture(scope="session")
def embedded_dir() -> Path:
    return REPO / "deploy" / "models" / "tiny-flash-next"


@pytest.fixture(scope="session")
def tiny(embedded_dir: Path) -> ModelAndHeaders:
    return load_model_spec(str(embedded_dir))


@pytest.fixture
def tiny_copy(embedded_dir: Path, tmp_path: Path) -> Path:
    """The embedded model directory, writable."""
    target = tmp_path / "tiny"
    shutil.copytree(embedded_dir, target, copy_function=shutil.copyfile)
    target.chmod(0o755)
    return target


@pytest.fixture(scope="session")
def tiny_config(embedded_dir: Path) -> dict[str, Any]:
    return dict(json.loads((embedded_dir / "config.json").read_text()))


@pytest.fixture(scope="session")
def real_config() -> dict[str, Any]:
    """The published geometry: 512 experts, 48 layers, text config nested beside vision."""
    return {"model_type": "qwen4_exp", "text_config": REAL_TEXT, "vision_config": {"depth": 27}}


def _entries_of(spec: ModelSpec, per_expert: bool, shards: int) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for tensor in (*spec.tensors, *spec.draft_tensors):
        dtype = "I64" if tensor.dtype is DTypeRule.INT64 else "BF16"
        for piece in tensor.pieces:
            name, shape = piece.name, piece.shape
            if per_expert and name.endswith("experts.gate_up_proj"):
                for e, part in ((e, p) for e in range(shape[0]) for p in ("gate", "up")):
                    renamed = name.replace("gate_up_proj", f"{e}.{part}_proj.weight")
                    entries[renamed] = (dtype, (shape[1] // 2, shape[2]))
            elif per_expert and name.endswith("experts.down_proj"):
                for e in range(shape[0]):
                    renamed = name.replace("down_proj", f"{e}.down_proj.weight")
                    entries[renamed] = (dtype, shape[1:])
            elif shards > 1 and name.endswith("ngram_embedding.weight"):
                for i in range(shards):
                    renamed = name.replace("weight", f"shard_{i}.weight")
                    entries[renamed] = (dtype, (shape[0] // shards, shape[1]))
            else:
                entries[name] = (dtype, shape)
    return entries


@pytest.fixture(scope="session")
def make_headers() -> Callable[..., CheckpointHeaders]:
    """Headers that a checkpoint of a config would have, in the layout asked for."""

    def make(
        config: Mapping[str, Any],
        per_expert: bool = False,
        shards: int = 1,
        rename: Callable[[str], str] = lambda name: name,
        extra: Entries | None = None,
    ) -> CheckpointHeaders:
        spec = build_spec("synthetic", config, None, None)
        entries = {**_entries_of(spec, per_expert, shards), **(extra or {})}
        tensors = {}
        for name, entry in header_entries(entries).items():
            start, end = entry["data_offsets"]
            tensors[rename(name)] = TensorHeader(
                "/synthetic/model.safetensors",
                entry["dtype"],
                tuple(entry["shape"]),
                start,
                end - start,
            )
        return CheckpointHeaders("/synthetic", tensors, 0)

    return make


@pytest.fixture(scope="session")
def real(
    real_config: dict[str, Any], make_headers: Callable[..., CheckpointHeaders]
) -> ModelAndHeaders:
    """Spec and headers in the real geometry, fused experts, 128 table shards."""
    headers = make_headers(
        real_config,
        shards=128,
        extra={"model.visual.blocks.0.attn.qkv.weight": ("BF16", (3456, 1152))},
    )
    return build_spec("flash-next", real_config, None, headers), headers


# Vision towers of the published checkpoints, which hold them beside the text model. Shapes follow
# the vision models of transformers 5.24 with the values of the public configs.
def _qwen_vision(out: int) -> dict[str, tuple[int, ...]]:
    width, inner, merged = 1152, 4304, 4 * 1152
    block = {
        "norm1": (width,), "norm2": (width,), "attn.qkv": (3 * width, width),
        "attn.proj": (width, width), "mlp.linear_fc1": (inner, width),
        "mlp.linear_fc2": (width, inner),
    }  # fmt: skip
    parts = {f"blocks.{i}.{name}": shape for i in range(27) for name, shape in block.items()}
    parts |= {
        "patch_embed.proj": (width, 3, 2, 16, 16), "merger.norm": (width,),
        "merger.linear_fc1": (merged, merged), "merger.linear_fc2": (out, merged),
    }  # fmt: skip
    biased = {f"{name}.bias": shape[:1] for name, shape in parts.items()}
    weights = {f"{name}.weight": shape for name, shape in parts.items()}
    return {**weights, **biased, "pos_embed.weight": (2304, width)}


def _glm_vision() -> dict[str, tuple[int, ...]]:
    width, inner, out, wide = 1024, 4096, 4096, 10240
    block = {
        "attn.qkv": (3 * width, width), "attn.proj": (width, width),
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    parts = {f"blocks.{i}.{name}": shape for i in range(24) for name, shape in block.items()}
    parts |= {"patch_embed.proj": (width, 3, 2, 14, 14), "downsample": (out, width, 2, 2)}
    parts["merger.post_projection_norm"] = (out,)
    biased = {f"{name}.bias": shape[:1] for name, shape in parts.items()}
    norms = {"norm1": width, "norm2": width, "attn.q_norm": 64, "attn.k_norm": 64}
    parts |= {f"blocks.{i}.{name}": (size,) for i in range(24) for name, size in norms.items()}
    parts |= {
        "merger.proj": (out, out), "merger.gate_proj": (wide, out),
        "merger.up_proj": (wide, out), "merger.down_proj": (out, wide),
        "post_layernorm": (width,),
    }  # fmt: skip
    return {**{f"{name}.weight": shape for name, shape in parts.items()}, **biased}


VISION = {
    "Qwen3.8-Flash-Next": _qwen_vision(2560),
    "Qwen3.8-Flash-Next-FP8": _qwen_vision(2560),
    "Qwen3.6-35B-A3B-FP8": _qwen_vision(2048),
    "GLM-5.3-Flash": _glm_vision(),
}
# Small tensors that the published GLM checkpoint keeps in F32, see `total_size` of its index.
GLM_FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias", "_base", "_scale")


def _disk_dtype(tensor: TensorSpec, name: str) -> str:
    if tensor.format is not None:
        return "F8_E4M3"
    if tensor.dtype is DTypeRule.INT64:
        return "I64"
    return "F32" if name.endswith((*GLM_FLOAT32, "weight_scale_inv")) else "BF16"


@pytest.fixture(scope="session")
def config_path() -> Callable[[str], str]:
    """The `config.json` of a published model."""

    def path(name: str) -> str:
        return str(Path(__file__).parent / "configs" / name / "config.json")

    return path


@pytest.fixture(scope="session")
def published_headers(config_path: Callable[[str], str]) -> Callable[[str], CheckpointHeaders]:
    """Headers of a published checkpoint: the names that its config implies, and its vision tower.

    Text tensors come from the spec that the config alone gives; counts and sizes of the whole set
    are compared with the published ones.
    """

    @cache
    def make(name: str) -> CheckpointHeaders:
        spec = spec_from_config(config_path(name))
        every = (
            *spec.tensors, *spec.draft_tensors, *spec.scale_tensors, *spec.draft_scale_tensors,
        )  # fmt: skip
        entries: dict[str, tuple[str, tuple[int, ...]]] = {
            piece.name: (_disk_dtype(tensor, piece.name), piece.shape)
            for tensor in every
            for piece in tensor.pieces
        }
        entries |= {f"model.visual.{part}": ("BF16", s) for part, s in VISION[name].items()}
        tensors = {}
        at = 0
        for tensor_name, (dtype, shape) in entries.items():
            nbytes = prod(shape) * DTYPE_BITS[dtype] // 8
            tensors[tensor_name] = TensorHeader("/pub/model.safetensors", dtype, shape, at, nbytes)
            at += nbytes
        return CheckpointHeaders("/pub", tensors, 0)

    return make
