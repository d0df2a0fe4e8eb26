"""Sampling on the C++ kernels, fp32 logits of any number of rows.

The same counters and words as `ops.reference.sampling`; logarithms may differ in the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.cpu import torch_variants as torch_variant
from ops.cpu.layout import row_stride
from ops.cpu.library import library
from ops.reference import sampling


def nonfinite_rows(logits: Tensor) -> Tensor:
    rows, vocab = logits.shape
    stride = row_stride(logits)
    if not vocab or not stride:
        return torch_variant.nonfinite_rows(logits)
    bad = torch.empty(rows, dtype=torch.bool)
    library().nrank_nonfinite_rows(logits.data_ptr(), stride, bad.data_ptr(), rows, vocab)
    return bad


def greedy(logits: Tensor) -> Tensor:
    rows, vocab = logits.shape
    stride = row_stride(logits)
    if not vocab or not stride or logits.dtype != torch.float32:
        return sampling.greedy(logits)
    ids = torch.empty(rows, dtype=torch.int64)
    library().nrank_greedy(logits.data_ptr(), stride, ids.data_ptr(), rows, vocab)
    return ids


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
    vocab_start: int = 0,
) -> Tensor:
    parameters = (temperature, top_k, top_p, min_p, seed, choice, position)
    rows, vocab = logits.shape
    stride = row_stride(logits)
    if not vocab or not stride or not all(p.is_contiguous() for p in parameters):
        return sampling.sample(logits, *parameters, vocab_start)
    ids = torch.empty(rows, dtype=torch.int64)
    library().nrank_sample(
        logits.data_ptr(), stride, *(p.data_ptr() for p in parameters), None, ids.data_ptr(),
        rows, vocab, vocab_start,
    )  # fmt: skip
    return ids


def sample_local(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
    vocab_start: int,
) -> tuple[Tensor, Tensor]:
    parameters = (temperature, seed, choice, position)
    rows, vocab = logits.shape
    stride = row_stride(logits)
    if not vocab or not stride or not all(p.is_contiguous() for p in parameters):
        return sampling.sample_local(logits, *parameters, vocab_start)
    scores, ids = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    library().nrank_sample(
        logits.data_ptr(), stride, temperature.data_ptr(), None, None, None, seed.data_ptr(),
        choice.data_ptr(), position.data_ptr(), scores.data_ptr(), ids.data_ptr(),
        rows, vocab, vocab_start,
    )  # fmt: skip
    return scores, ids


OPERATORS = (
    nonfinite_rows,
    greedy,
    sample,
    sample_local,
)
