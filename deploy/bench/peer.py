"""The peer that `nrank bench` measures beside the engine: transformers' own `generate`.

Same checkpoint, same process, float32, one thread. Several requests are a static batch, which is
what the library offers; prompts of a workload have one length, so nothing is padded.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from deploy.bench.workloads import Run, Workload
from placement.errors import ConfigError, NrankError

MAX_TRIES = 3


class TransformersPeer:
    """A System; its decode time is that of the answer minus that of the first token alone."""

    name = "transformers"
    ranks = 1

    def __init__(self, model_dir: str) -> None:
        self._model = _load(model_dir)

    def run(self, workload: Workload) -> Run:
        """Two calls for a decode workload, repeated where a disturbance made the second shorter."""
        for _ in range(MAX_TRIES):
            ttft_s, token_ids = self._timed(workload, 1)
            if not workload.is_decode:
                return Run(token_ids, ttft_s)
            whole_s, token_ids = self._timed(workload, workload.max_tokens)
            if whole_s > ttft_s:
                return Run(token_ids, ttft_s, whole_s - ttft_s)
        raise NrankError(
            f"{workload.id}: transformers took longer for 1 token than for {workload.max_tokens}, "
            f"{MAX_TRIES} times; stop other work on this machine"
        )

    def _timed(self, workload: Workload, num_tokens: int) -> tuple[float, tuple[Any, ...]]:
        """Seconds of one call, and the generated ids."""
        began = time.perf_counter()
        token_ids = self._generate(workload.prompts, num_tokens)
        return time.perf_counter() - began, token_ids

    def _generate(
        self, prompts: tuple[tuple[int, ...], ...], num_tokens: int
    ) -> tuple[tuple[int, ...], ...]:
        import torch

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens
            )
        return tuple(tuple(row) for row in out[:, ids.shape[1] :].tolist())


def _load(model_dir: str) -> Any:
    """The model, greedy and deaf to end tokens; ConfigError when it can't be had."""
    try:
        import torch

        transformers: Any = import_module("transformers")  # partly untyped
    except ImportError as error:
        raise ConfigError(f"--peer transformers: {error}; install it or use --peer none") from error
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"--peer transformers can't load {model_dir}: {error}; use --peer none"
        ) from error
    # generate() fills what a call leaves None from here, so end tokens have to go here.
    model.generation_config = transformers.GenerationConfig(do_sample=False, use_cache=True)
    return model.eval()
