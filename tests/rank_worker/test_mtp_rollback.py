"""Whatever is rejected leaves no trace: state after each round equals that of a run without drafts.

Drafts are planted, so that every count of accepted ones occurs, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rank_worker import model as model_module
from rank_worker import runner as runner_module
from rank_worker.gated_delta import GatedDeltaMixer
from rank_worker.messages import EngineRequest, FinishReason
from rank_worker.model import Model
from rank_worker.ngram import NgramInjection
from rank_worker.step_plan import RowFlag

PROMPT = tuple((29 * i * i + 3 * i + 1) % 500 for i in range(41))
TOKENS = 32
SPREAD = 2e-5  # of the largest value: products of several rows add up in another order
Drivers = Callable[..., Any]
State = dict[str, Tensor]


def request(name: str = "a", tokens: int = TOKENS) -> EngineRequest:
    return EngineRequest(name, PROMPT, tokens, ignore_eos=True)


def state_of(driver: Any, slot: int) -> State:
    """Copies of everything that a commit writes."""
    out: State = {}
    for index, layer in enumerate(driver.runner.model.layers):
        if isinstance(layer.mixer, GatedDeltaMixer):
            out[f"{index} recurrent"] = layer.mixer.state.recurrent[slot].clone()
            out[f"{index} conv"] = layer.mixer.state.conv[slot].clone()
        if layer.ngram is not None:
            out[f"{index} ngram conv"] = layer.ngram.state.conv[slot].clone()
            out[f"{index} history"] = layer.ngram.state.history[slot].clone()
    return out


def differences(got: State, expected: State) -> Iterator[str]:
    for name, value in expected.items():
        scale = 0.0 if value.dtype is torch.int64 else SPREAD * float(value.abs().max())
        if not (got[name] - value).abs().max() <= scale:
            yield name


class Truth:
    """A run without drafts: its tokens, and its state by the number of computed ones."""

    def __init__(self, driver: Any) -> None:
        driver.scheduler.add(request())
        self.states: dict[int, State] = {}
        self.tokens: list[int] = []
        while driver.scheduler.has_work:
            (sequence,) = [*driver.scheduler.running, *driver.scheduler.waiting]
            driver.step()
            self.tokens = sequence.tokens
            if sequence.slot >= 0:
                self.states[sequence.num_computed] = state_of(driver, sequence.slot)


@pytest.fixture(scope="module")
def truth(driver: Drivers) -> Truth:
    return Truth(driver(0))


def planted(truth: Truth, at: int, k: int, right: int) -> list[int]:
    """Drafts for the tokens from `at` on, of which the first `right` are what will be sampled."""
    known = [*truth.tokens, *[0] * k][at : at + k]
    return [token if i < right else (token + 1 + i) % 500 for i, token in enumerate(known)]


class Round:
    """What one request's rounds came to with planted drafts."""

    def __init__(self, driver: Any, truth: Truth, k: int) -> None:
        driver.scheduler.add(request())
        self.accepted: list[int] = []
        self.wrong_states: list[str] = []
        (sequence,) = driver.scheduler.waiting
        while driver.scheduler.has_work:
            at = len(sequence.tokens)
            if sequence.has_drafts:
                right = len(self.accepted) * 7 % (k + 1)
                driver.plant(sequence.slot, planted(truth, at, k, right))
            driver.step()
            if driver.plans[-1].rows[0].flags & RowFlag.DRAFT:
                self.accepted.append(len(sequence.tokens) - at - 1)
            if sequence.slot >= 0:
                expected = truth.states.get(sequence.num_computed)
                if expected is not None:
                    self.wrong_states += differences(state_of(driver, sequence.slot), expected)
        self.tokens = sequence.tokens


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_any_number_of_accepted_drafts_leaves_tokens_and_state_as_without(
    driver: Drivers, truth: Truth, k: int
) -> None:
    rounds = Round(driver(k), truth, k)
    assert rounds.tokens == truth.tokens
    assert rounds.wrong_states == []
    assert set(rounds.accepted) == set(range(k + 1))


class KeepsRejectedInputs(GatedDeltaMixer):
    """Forgets to roll the convolution window back."""

    def commit(self, counts: Tensor) -> None:
        held = self.uncommitted
        assert held is not None
        super().commit(counts)
        window = self.state.conv
        lost = held.inputs[0][:, -window.shape[1] :]
        window[held.group.slots, -lost.shape[1] :] = lost


class LeaksRejectedTokens(GatedDeltaMixer):
    """Replays all tokens into the recurrent state, whatever was accepted."""

    def commit(self, counts: Tensor) -> None:
        held = self.uncommitted
        assert held is not None
        whole = torch.full_like(counts, held.group.width)
        before = self.state.conv.clone()
        super().commit(whole)
        self.state.conv.copy_(before)
        self.ops.window_commit_(held.inputs[0], self.state.conv, held.group.slots, counts)


class NeverCommits(GatedDeltaMixer):
    def commit(self, counts: Tensor) -> None:
        self.uncommitted = None


class KeepsRejectedNgrams(NgramInjection):
    """Forgets to roll the n-gram window and the token history back."""

    def commit(self, counts: Tensor) -> None:
        assert self.uncommitted is not None
        super().commit(torch.full_like(counts, self.uncommitted.group.width))


class CommitsAllRows(Model):
    def commit(self, counts: Tensor) -> None:
        super().commit(torch.full_like(counts, 3))


FAULTS: tuple[tuple[Any, str, type, str], ...] = (
    (model_module, "GatedDeltaMixer", KeepsRejectedInputs, "conv"),
    (model_module, "GatedDeltaMixer", LeaksRejectedTokens, "recurrent"),
    (model_module, "GatedDeltaMixer", NeverCommits, "recurrent"),
    (model_module, "NgramInjection", KeepsRejectedNgrams, "history"),
    (runner_module, "Model", CommitsAllRows, "recurrent"),
)


@pytest.mark.parametrize(("module", "name", "fault", "kind"), FAULTS, ids=lambda x: str(x)[-24:])
def test_a_seeded_fault_of_the_rollback_is_seen(
    driver: Drivers, truth: Truth, monkeypatch: pytest.MonkeyPatch, module: Any, name: str,
    fault: type, kind: str,
) -> None:  # fmt: skip
    """In the state right away, and in the answer."""
    monkeypatch.setattr(module, name, fault)
    rounds = Round(driver(2), truth, 2)
    assert any(kind in wrong for wrong in rounds.wrong_states)
    assert rounds.tokens != truth.tokens


def test_a_cancelled_round_leaves_nothing_to_the_next_owner_of_its_slot(
    driver: Drivers, truth: Truth
) -> None:
    one = driver(3, max_sequences=1)
    one.scheduler.add(EngineRequest("other", PROMPT[7:30], 30, ignore_eos=True))
    while not one.plans or not one.plans[-1].rows[0].flags & RowFlag.DRAFT:
        one.step()
    one.step(abort=["other"])
    one.scheduler.add(request("again"))
    ids = one.finish()["again"]
    assert [*PROMPT, *ids] == truth.tokens


def test_a_row_that_is_not_finite_ends_the_request_after_the_good_tokens(
    driver: Drivers, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three drafts are right, and the third of four logit rows is spoilt."""
    one = driver(3)
    one.scheduler.add(request())
    (sequence,) = one.scheduler.waiting
    one.step()
    made = len(sequence.tokens)
    one.plant(sequence.slot, planted(truth, made, 3, 3))
    forward = one.runner.model.forward

    def spoilt(batch: Any) -> tuple[Tensor, Tensor]:
        logits, streams = forward(batch)
        logits[2, 5] = float("nan")
        return logits, streams

    monkeypatch.setattr(one.runner.model, "forward", spoilt)
    (batch,) = one.step()
    assert list(batch.token_ids) == truth.tokens[made : made + 2]
    assert (batch.finish_reason, batch.error_kind) == (FinishReason.ERROR, "non_finite")
    assert batch.error_message is not None
    assert f"position {made + 2}" in batch.error_message
    assert (batch.draft_tokens, batch.accepted_tokens) == (3, 2)
    monkeypatch.undo()
    one.scheduler.add(request("again"))
    assert [*PROMPT, *one.finish()["again"]] == truth.tokens


def test_a_rejected_draft_whose_values_are_not_finite_leaves_no_trace(
    driver: Drivers, truth: Truth
) -> None:
    """Only token 499 is spoilt, and it occurs in wrong drafts only."""
    one = driver(2)
    assert 499 not in truth.tokens
    one.runner.model.embed[499] = float("nan")
    one.scheduler.add(request())
    (sequence,) = one.scheduler.waiting
    while one.scheduler.has_work:
        if sequence.has_drafts:
            one.plant(sequence.slot, [planted(truth, len(sequence.tokens), 1, 1)[0], 499])
        one.step()
    assert sequence.tokens == truth.tokens
    assert sequence.accepted_tokens > TOKENS // 3
