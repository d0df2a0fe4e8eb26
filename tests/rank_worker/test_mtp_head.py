"""The draft head against a slow one made of transformers' layer classes, without any cache.

It sees all entries of a sequence at once: what the engine wrote into pages over several rounds,
wrong guesses included, has to give the same logits.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen4_exp import modeling_qwen4_exp as oracle

from placement.errors import CheckpointError
from placement.models.registry import load_model_spec
from rank_worker.messages import EngineRequest, SamplingParams
from rank_worker.step_plan import RowFlag

PROMPT = tuple((31 * i * i + 7 * i + 5) % 500 for i in range(53))  # sparse from 35 tokens on
SPREAD = 3e-5  # of the largest logit
Drivers = Callable[..., Any]


class SlowHead:
    """Streams of the trunk from transformers; then norms, sums and one layer over all entries."""

    def __init__(self, folder: Path, per_stream: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager"
        ).eval()
        config = copy.deepcopy(self.model.config)
        config.num_hidden_layers, config.layer_types = 1, ["indexed_attention"]
        config.ple_layer_ids = []
        self.count, hidden = config.hc_count, config.hidden_size
        weights: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            weights |= {k[4:]: v.float() for k, v in load_file(file).items() if k[:4] == "mtp."}
        self.fc_embedding, self.fc_hidden = (
            weights["fc_embedding.weight"],
            weights["fc_hidden.weight"],
        )
        self.norm_embedding = oracle.Qwen4ExpTextRMSNorm(hidden, eps=config.rms_norm_eps)
        self.norm_hidden = oracle.Qwen4ExpTextRMSNorm(
            hidden * self.count, group_size=hidden if per_stream else None, eps=config.rms_norm_eps
        )
        self.layer = oracle.Qwen4ExpTextDecoderLayer(config, 0)
        self.mixer = oracle.Qwen4ExpTextGatedResidual(config, use_combine=False)
        self._fill(self.norm_embedding, weights, "pre_fc_norm_embedding.")
        self._fill(self.norm_hidden, weights, "pre_fc_norm_hidden.")
        self._fill(self.mixer, weights, "hyper_connection_mixer.")
        self._fill(self.layer, weights, "layers.0.")

    @staticmethod
    def _fill(module: torch.nn.Module, weights: dict[str, Tensor], prefix: str) -> None:
        part = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        for kind in ("gate_up_proj", "down_proj"):  # banks of experts, stored one by one
            if kind == "gate_up_proj" and "mlp.experts.0.gate_proj.weight" in part:
                part["mlp.experts.gate_up_proj"] = torch.stack([
                    torch.cat([part.pop(f"mlp.experts.{e}.gate_proj.weight"),
                               part.pop(f"mlp.experts.{e}.up_proj.weight")]) for e in range(14)
                ])  # fmt: skip
            if kind == "down_proj" and "mlp.experts.0.down_proj.weight" in part:
                banks = [part.pop(f"mlp.experts.{e}.down_proj.weight") for e in range(14)]
                part["mlp.experts.down_proj"] = torch.stack(banks)
        module.load_state_dict(part, strict=True)
        module.eval()

    def streams(self, tokens: list[int]) -> Tensor:
        """What goes into the final mixer, [T, S, H]."""
        seen: list[Tensor] = []
        hook = self.model.model.hyper_connection_mixer.register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0])
        )
        self.model(torch.tensor([tokens]))
        hook.remove()
        return seen[0][0].unflatten(-1, (self.count, -1))

    def logits(self, streams: Tensor, next_ids: list[int]) -> tuple[Tensor, Tensor]:
        """Logits of the last entry, and the streams that it leaves [1, S, H]."""
        count = len(next_ids)
        token = self.norm_embedding(self.model.model.embed_tokens(torch.tensor(next_ids)))
        normed = self.norm_hidden(streams[:count].flatten(1)).unflatten(1, (self.count, -1))
        x = normed @ self.fc_hidden.T + (token @ self.fc_embedding.T)[:, None]
        x = x.flatten(1)[None]
        rope = self.model.model.rotary_emb(x, torch.arange(count).expand(3, 1, -1))
        causal = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
        y = self.layer(x, position_embeddings=rope, attention_mask=causal)
        last = self.mixer(y)[0, -1]
        return self.model.lm_head(last), y[0, -1:].unflatten(-1, (self.count, -1))


class Recorder:
    """Logits of every pass of the engine's head."""

    def __init__(self, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[Tensor] = []
        head = driver.runner.drafter.head
        predict = head.predict

        def recorded(entries: Any, rows: Any) -> tuple[Tensor, Tensor]:
            logits, streams = predict(entries, rows)
            self.passes.append(logits[0].clone())
            return logits, streams

        monkeypatch.setattr(head, "predict", recorded)


def close(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).abs().max() < SPREAD * expected.abs().max())


@pytest.fixture(scope="module")
def folders(random_checkpoint: Callable[..., Path], tmp_path_factory: Any) -> dict[str, Path]:
    full = random_checkpoint(layers=4)
    streams = tmp_path_factory.mktemp("per-stream") / "model"
    shutil.copytree(full, streams)
    config = json.loads((full / "config.json").read_text())
    config["mtp_pre_fc_norm_hidden"] = "per_stream"
    (streams / "config.json").write_text(json.dumps(config))
    return {"full": full, "per_stream": streams}


@pytest.mark.parametrize("norm", ["full", "per_stream"])
@pytest.mark.parametrize("chunk", [0, 16])
@torch.no_grad()
def test_every_pass_equals_a_head_without_cache(
    driver: Drivers, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, norm: str,
    chunk: int,
) -> None:  # fmt: skip
    """First and chained passes, after a prompt and after rounds that accepted 0, 1 and 2 drafts."""
    k, num_rounds = 2, 9
    one = driver(k, folders[norm], prefill_chunk_tokens=chunk)
    recorder = Recorder(one, monkeypatch)
    one.scheduler.add(EngineRequest("a", PROMPT, 60, ignore_eos=True))
    (sequence,) = one.scheduler.waiting
    truth = driver(0, folders["full"])
    truth.scheduler.add(EngineRequest("a", PROMPT, 60, ignore_eos=True))
    known = [*PROMPT, *truth.finish()["a"]]
    slow = SlowHead(folders[norm], norm == "per_stream")
    streams = slow.streams(known)
    checked, accepted = 0, set()
    while checked < num_rounds:
        before = len(sequence.tokens)
        if sequence.has_drafts:
            right = checked % (k + 1)
            one.plant(sequence.slot, [known[before + i] + (i >= right) for i in range(k)])
        recorder.passes.clear()
        one.step()
        if not recorder.passes:
            continue
        assert len(recorder.passes) == k
        accepted.add(len(sequence.tokens) - before - 1)
        entries, made = sequence.tokens[1:], streams
        for got in recorder.passes:
            expected, left = slow.logits(made, entries)
            assert close(got, expected), (checked, len(entries))
            made = torch.cat([made[: len(entries)], left])
            entries = [*entries, int(got.argmax())]
        checked += 1
    assert sequence.tokens == known[: len(sequence.tokens)]
    assert accepted == {0, 1, 2}
    assert any(row.flags & RowFlag.DRAFT for plan in one.plans for row in plan.rows)


def test_no_drafts_are_made_behind_an_end_token(
    driver: Drivers, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who goes on in spite of it gets the same ids from the drafts that it had."""
    plain = driver(0, folders["full"])
    plain.scheduler.add(EngineRequest("a", PROMPT, 30, ignore_eos=True))
    (expected,) = plain.finish().values()
    one = driver(2, folders["full"])
    head = one.runner.drafter.head
    monkeypatch.setattr(head, "end_ids", frozenset({expected[9]}))
    recorder = Recorder(one, monkeypatch)
    one.scheduler.add(EngineRequest("a", PROMPT, 30, ignore_eos=True))
    seen: list[tuple[bool, bool]] = []  # an end token among the new ones, drafts made
    made: list[int] = []
    while one.scheduler.has_work:
        (batch,) = one.step()
        made += batch.token_ids
        proposes = bool(one.plans[-1].rows[0].flags & RowFlag.PROPOSE)
        seen += [(expected[9] in batch.token_ids, bool(recorder.passes))] * proposes
        recorder.passes.clear()
    assert made == expected
    assert set(seen) == {(True, False), (False, True)}


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=0.8, top_k=9, top_p=0.8, min_p=0.01, seed=4),
    ],
)
def test_a_guess_is_the_choice_that_the_sampler_would_make(
    driver: Drivers, folders: dict[str, Path], sampling: SamplingParams
) -> None:
    one = driver(2, folders["full"])
    one.scheduler.add(EngineRequest("a", PROMPT, 9, sampling, ignore_eos=True))
    (sequence,) = one.scheduler.waiting
    one.step()
    sampler, slot = one.runner.sampler, sequence.slot
    for position in range(5):
        logits = torch.randn(1, 512) * 3
        where = torch.tensor([slot]), (slot,), torch.tensor([position])
        assert torch.equal(sampler.draft(logits, *where), sampler.sample(logits, *where))
    logits[0, 7] = float("nan")
    assert sampler.sample(logits, *where).tolist() == [-1]
    assert 0 <= int(sampler.draft(logits, *where)) < 512


def test_the_two_norms_are_told_apart(folders: dict[str, Path]) -> None:
    assert not load_model_spec(str(folders["full"]))[0].draft_norm_per_stream
    assert load_model_spec(str(folders["per_stream"]))[0].draft_norm_per_stream


def test_an_unknown_norm_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["full"], tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "mtp_pre_fc_norm_hidden": "half"}))
    with pytest.raises(CheckpointError, match=r"mtp_pre_fc_norm_hidden.*full or per_stream"):
        load_model_spec(str(tmp_path / "model"))
