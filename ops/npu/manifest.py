"""Every operator of torch_npu that the npu backend calls: schema, chips, evidence, number types.

A call that is not here fails (`ops/npu/library.py`). A test compares the schemas with those of the
installed torch_npu; that of 2.10.0.post4, 2.13.0 and 2.14.0 is the same for all entries. Of ATB's
operators the text of 2.10.0.post4 and 2.13.0 was compared, of 2.14.0 the types of the arguments of
`_npu_reshape_and_cache` alone.

The gating operators (npu_moe_gating_top_k_softmax, npu_moe_gating_top_k) are left out: CANN's pages
do not list the Atlas inference series for the first and name no order of equal scores, where the
router promises the lowest id; the second is of the same chips.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

TORCH_NPU_VERSIONS = ("2.10", "2.14")  # lowest and highest (major, minor) with these schemas


class Evidence(StrEnum):
    """Why an operator is believed to run on a 310P. None of it is a run of ours."""

    DOCUMENTED = "doc"  # the product table of its page lists the Atlas inference series
    USED_BY_OTHERS = "vllm-310p"  # vllm-ascend calls it on a 310P (August 2026, CANN 9.1.0)
    OTHER_CHIPS = "doc-no"  # documented for A2 and A3 only
    HOST = "host"  # layout and memory only, nothing is computed
    SCHEMA = "schema"  # its schema is compared with the live one, and nothing calls it


@dataclass(frozen=True)
class NpuCall:
    """One operator. `dtypes` names what the called form takes on a 310P."""

    name: str
    schema: str
    evidence: tuple[Evidence, ...]
    dtypes: str
    note: str = ""
    namespace: str = "npu"


_CALLS = (
    NpuCall(
        "npu_rms_norm",
        "npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> "
        "(Tensor, Tensor)",
        (Evidence.DOCUMENTED, Evidence.USED_BY_OTHERS),
        "float16, float32; gamma of the same type",
        "the second result is 1/rms in float32",
    ),
    NpuCall(
        "npu_rotary_mul",
        'npu::npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", '
        "Tensor? rotate=None) -> Tensor",
        (Evidence.DOCUMENTED,),
        "float16, float32",
        "any even width, so a part of the head can be rotated; an aclop on 310P",
    ),
    NpuCall(
        "npu_swiglu",
        "npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor",
        (Evidence.USED_BY_OTHERS,),
        "float16, float32",
        "its page says A2",
    ),
    NpuCall(
        "npu_moe_init_routing_v2",
        "npu::npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, "
        "Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1, "
        "int drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, "
        "int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, "
        "int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
        (Evidence.USED_BY_OTHERS,),
        "float16; ids int32 in 0..expert_num-1, an id beyond writes out of bounds",
        "the 310P form ignores active_expert_range and gives int32 counts, the A2 form int64",
    ),
    NpuCall(
        "npu_moe_token_unpermute",
        "npu::npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, "
        "Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
        (Evidence.USED_BY_OTHERS,),
        "float16",
    ),
    NpuCall(
        "npu_grouped_matmul",
        "npu::npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, "
        "Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, "
        "Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
        "Tensor? group_list=None, Tensor[]? activation_input=None, "
        "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, "
        "int? split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0, "
        "int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, "
        "int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None) -> "
        "Tensor[]",
        (Evidence.DOCUMENTED, Evidence.USED_BY_OTHERS),
        "float16, without scales and activation, group_type 0",
    ),
    NpuCall(
        "npu_quant_grouped_matmul_dequant",
        "npu::npu_quant_grouped_matmul_dequant(Tensor x, Tensor quantized_weight, "
        "Tensor weight_scale, Tensor group_list, *, Tensor? bias=None, Tensor? x_scale=None, "
        "Tensor? x_offset=None, Tensor? smooth_scale=None, "
        'str? quant_mode="pertoken") -> Tensor',
        (Evidence.DOCUMENTED, Evidence.USED_BY_OTHERS),
        "float16 x, int8 weight [E, N, K], float32 scale [E, N], int64 cumulated counts",
        "310P only; no empty tensor, N and K multiples of 16; weight in rows or FRACTAL_NZ",
    ),
    NpuCall(
        "npu_quant_matmul_dequant",
        "npu::npu_quant_matmul_dequant(Tensor x, Tensor quantized_weight, Tensor weight_scale, *, "
        "Tensor? bias=None, Tensor? x_scale=None, Tensor? x_offset=None, "
        'Tensor? smooth_scale=None, str? quant_mode="pertoken") -> Tensor',
        (Evidence.DOCUMENTED,),
        "float16 x, int8 weight [N, K], float32 scale [N]",
        "310P only; N and K multiples of 16 here, as the grouped one wants them",
    ),
    NpuCall(
        "npu_scatter_nd_update_",
        "npu::npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> "
        "Tensor(a!)",
        (Evidence.DOCUMENTED,),
        "float16, float32",
    ),
    NpuCall(
        "npu_prompt_flash_attention",
        "npu::npu_prompt_flash_attention(Tensor query, Tensor key, Tensor value, *, "
        "Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? pse_shift=None, "
        "int[]? actual_seq_lengths=None, Tensor? deq_scale1=None, Tensor? quant_scale1=None, "
        "Tensor? deq_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, "
        "int num_heads=1, float scale_value=1., int pre_tokens=2147483647, int next_tokens=0, "
        'str input_layout="BSH", int num_key_value_heads=0, '
        "int[]? actual_seq_lengths_kv=None, int sparse_mode=0) -> Tensor",
        (Evidence.DOCUMENTED,),
        "float16; at most 128 sequences, 256 heads, 65,535 tokens, 512 a head; sparse_mode 0",
    ),
    NpuCall(
        "npu_format_cast",
        "npu::npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None, "
        "int? input_dtype=None) -> Tensor",
        (Evidence.DOCUMENTED, Evidence.USED_BY_OTHERS),
        "float16, int8",
        "refuses a size of 1 for FRACTAL_NZ",
    ),
    NpuCall(
        "_npu_reshape_and_cache",
        "atb::_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, "
        "Tensor(b!) value_cache, Tensor slot_indices) -> ()",
        (Evidence.SCHEMA, Evidence.USED_BY_OTHERS),
        "float16; slots int32",
        "caches in FRACTAL_NZ, [pages, heads * width / 16, page tokens, 16]",
        namespace="atb",
    ),
    NpuCall(
        "_npu_paged_attention",
        "atb::_npu_paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, "
        "int num_kv_heads, int num_heads, float scale_value, Tensor block_table, "
        "Tensor context_lens, Tensor(a!) out, *, Tensor? workspace=None) -> ()",
        (Evidence.SCHEMA, Evidence.USED_BY_OTHERS),
        "float16; table and lengths int32, lengths on the host",
        "dense decode alone: our layers attend to chosen blocks",
        namespace="atb",
    ),
    NpuCall(
        "_npu_paged_attention_splitfuse",
        "atb::_npu_paged_attention_splitfuse(Tensor query, Tensor key_cache, Tensor value_cache, "
        "Tensor block_table, Tensor context_lens, Tensor mask, Tensor seq_len, "
        "int num_kv_heads, int num_heads, float scale_value, Tensor(a!) out) -> ()",
        (Evidence.SCHEMA, Evidence.USED_BY_OTHERS),
        "float16; lengths int32 on the host",
        "prefill chunks behind a cached context",
        namespace="atb",
    ),
    NpuCall(
        "_npu_flash_attention",
        "atb::_npu_flash_attention(Tensor query, Tensor key, Tensor value, Tensor mask, "
        "Tensor seq_len, float scale_value, int num_heads, int num_kv_heads, "
        "Tensor(a!) out) -> ()",
        (Evidence.SCHEMA, Evidence.USED_BY_OTHERS),
        "float16; mask float16 in FRACTAL_NZ, lengths int32 on the host",
        "self-attention of whole prompts",
        namespace="atb",
    ),
    NpuCall(
        "get_npu_format",
        "npu::get_npu_format(Tensor input) -> int",
        (Evidence.HOST,),
        "any",
    ),
)
MANIFEST: dict[str, NpuCall] = {call.name: call for call in _CALLS}
