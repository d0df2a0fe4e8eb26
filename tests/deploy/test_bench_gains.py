"""What `nrank bench` says of reuse and drafts: who runs when, on what, and the figures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from cluster.tokens import Tokenizer
from deploy.bench.engine_system import EngineSystem, StreamRecord
from deploy.bench.gains import GainWorkloads, Gangs, measure_gains
from deploy.bench.steps import StepSplit, StepTimes
from deploy.bench.texts import draft_workloads, make_texts
from deploy.bench.workloads import (
    FULL,
    QUICK,
    Run,
    StreamRun,
    StreamWorkload,
    Workload,
    random_prompt,
    usable_ids,
)
from deploy.bench_command import load_gain_workloads, plan_engines
from deploy.prompts import ModelLimits
from placement.config import EngineConfig
from placement.errors import NrankError
from rank_worker.launch import GenerationResult
from rank_worker.messages import EngineRequest, FinishReason, RankSnapshot, TokenBatch

TEXT = Workload("counting-1", ((5, 6), (7, 8)), 9, end_token_ids=(3,), in_turn=True)
PREFIXES = [Workload("prefix-4", ((i, 6, 7, 8),), 2) for i in range(3)]
STREAM = StreamWorkload("beside-5", (5, 6), (7, 8, 9, 10, 11), alone_tokens=3, max_tokens=20)
ANSWERS = ((1, 2, 3), (4, 5, 3))


@dataclass
class FakeGang:
    """Answers with `answers`, in half the time for each `speed`; calls of all go into one log."""

    name: str
    log: list[str]
    speed: float = 1.0
    ranks: int = 1
    answers: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)

    def run(self, workload: Workload) -> Run:
        self.log.append(f"{self.name}{self.ranks} {workload.prompts[0][0]}")
        seen = self.log.count(self.log[-1])
        answer = self.answers.pop(0) if self.answers else ANSWERS[: len(workload.prompts)]
        return Run(answer, 6 / self.speed / seen, 8 / self.speed, 100 * (seen - 1), 8, 6)

    def run_beside(self, workload: StreamWorkload) -> StreamRun:
        self.log.append(f"{self.name}{self.ranks}")
        made = self.answers.pop(0)[0] if self.answers else (1, 2, 3)
        return StreamRun((made, (9,)), 100.0, 40.0 + 10 * len(self.log), 2.0)


def gangs(log: list[str], ranks: Sequence[int] = (1, 2)) -> list[Gangs]:
    return [
        Gangs(
            FakeGang("plain", log, ranks=count),
            FakeGang("drafts", log, 2.0, count),
            FakeGang("reuse", log, ranks=count),
        )
        for count in ranks
    ]


def test_drafts_are_measured_beside_none_in_turns_at_each_rank_count() -> None:
    log: list[str] = []
    gains = measure_gains(gangs(log), GainWorkloads(drafts=[TEXT]), repeats=3)
    assert log == ["plain1 5", "drafts1 5", "plain2 5", "drafts2 5"] * 4
    first, second = gains.drafts
    assert (first.ranks, second.ranks, first.concurrency) == (1, 2, 1)
    assert (first.prompts, first.prompt_tokens, first.answer_tokens) == (2, 4, 6)
    assert (first.plain_tokens_per_s.median, first.drafted_tokens_per_s.median) == (0.5, 1.0)
    assert first.speedup.median == 2.0
    assert (first.draft_tokens, first.accepted_tokens, first.acceptance) == (24, 18, 0.75)


def test_a_prompt_is_new_once_and_then_measured_again_on_the_same_engine() -> None:
    log: list[str] = []
    gains = measure_gains(gangs(log), GainWorkloads(prefixes=PREFIXES), repeats=2)
    turn = ["plain1 {}", "reuse1 {}", "reuse1 {}", "plain2 {}", "reuse2 {}", "reuse2 {}"]
    assert log == [call.format(i) for i in range(3) for call in turn]
    row = gains.prefixes[1]
    assert (row.ranks, row.prompt_tokens, row.cached_tokens) == (2, 4, 100)
    assert (row.cold_ttft_s.median, row.warm_ttft_s.median, row.speedup.median) == (6.0, 3.0, 2.0)


def test_the_share_of_a_stream_is_that_of_each_turn_and_the_warm_up_does_not_count() -> None:
    log: list[str] = []
    gains = measure_gains(gangs(log), GainWorkloads(streams=[STREAM]), repeats=2)
    assert log == ["plain1", "plain2"] * 3
    row = gains.streams[0]
    assert (row.id, row.prompt_tokens, row.prefill_s.median) == ("beside-5", 5, 2.0)
    assert (row.share.min, row.share.max) == (0.7, 0.9)


WRONG = ((1, 9, 3), (4, 5, 3))


@pytest.mark.parametrize(
    ("engine", "call", "kind"),
    [
        ("drafting", 0, "drafts"),
        ("drafting", 2, "drafts"),
        ("plain", 1, "drafts"),
        ("reusing", 0, "prefixes"),
        ("reusing", 3, "prefixes"),
        ("plain", 2, "prefixes"),
        ("plain", 1, "streams"),
    ],
)
@pytest.mark.parametrize("gang", [0, 1])
def test_any_run_with_other_ids_stops_the_bench(
    gang: int, engine: str, call: int, kind: str
) -> None:
    workloads = GainWorkloads(drafts=[TEXT], prefixes=PREFIXES, streams=[STREAM])
    only = replace(GainWorkloads(), **{kind: getattr(workloads, kind)})
    systems = gangs([])
    width = len(PREFIXES[0].prompts) if kind == "prefixes" else len(ANSWERS)
    getattr(systems[gang], engine).answers = [ANSWERS[:width]] * call + [WRONG[:width]]
    with pytest.raises(NrankError, match="made other ids than plain with ranks=1 from token 1"):
        measure_gains(systems, only, repeats=3)


def test_streams_of_different_length_are_compared_as_far_as_both_go() -> None:
    systems = gangs([], ranks=(1,))
    plain = systems[0].plain
    assert isinstance(plain, FakeGang)
    plain.answers = [((1, 2, 3),), ((1, 2),), ((1, 2, 3, 4),)]
    measure_gains(systems, GainWorkloads(streams=[STREAM]), repeats=2)
    plain.answers = [((1, 2, 3),), ((1, 2, 4, 4),)]
    with pytest.raises(NrankError, match="from token 2 of request 0"):
        measure_gains(systems, GainWorkloads(streams=[STREAM]), repeats=1)


def test_a_text_whose_answers_end_at_once_is_left_out_with_a_line() -> None:
    systems = gangs([], ranks=(1,))
    for gang in (systems[0].plain, systems[0].drafting):
        assert isinstance(gang, FakeGang)
        gang.answers = [((3,), (3,))] * 2
    gains = measure_gains(systems, GainWorkloads(drafts=[TEXT], left_out=["x"]), repeats=1)
    assert gains.drafts == []
    assert gains.left_out == ["x", "counting-1: the model ends its answers with the first token"]


def stream_batches(record: StreamRecord, *times: float, tokens: int = 1) -> None:
    for moment in times:
        record.add(TokenBatch("stream", (7,) * tokens, time_s=moment))


def test_rates_of_a_stream_are_taken_before_beside_and_after_the_prompt() -> None:
    record = StreamRecord(STREAM)
    stream_batches(record, 10.0, 11.0, 12.0)
    assert not record.wants_prompt
    stream_batches(record, 13.0)
    assert record.wants_prompt
    record.submitted_s = 13.5
    stream_batches(record, 15.0, 21.0)
    record.answered(TokenBatch("prompt", (8,), FinishReason.LENGTH, time_s=23.0))
    stream_batches(record, 23.0, 24.0, 25.0)
    assert not record.is_whole
    stream_batches(record, 26.0)
    assert record.is_whole
    run = record.run()
    assert run.token_ids == ((7,) * 10, (8,))
    assert run.alone_tokens_per_s == (3 + 3) / (3.0 + 3.0)
    assert run.beside_tokens_per_s == 3 / (23.0 - 13.0)
    assert run.prefill_s == 9.5


def test_tokens_that_come_two_at_a_time_count_as_two() -> None:
    record = StreamRecord(STREAM)
    stream_batches(record, 10.0, 11.0, tokens=2)
    record.submitted_s = 11.0
    stream_batches(record, 13.0, tokens=2)
    record.answered(TokenBatch("prompt", (8,), FinishReason.LENGTH, time_s=13.0))
    stream_batches(record, 14.0, 15.0, tokens=2)
    run = record.run()
    assert (run.alone_tokens_per_s, run.beside_tokens_per_s) == (2.0, 1.0)


def test_a_stream_that_ends_before_the_prompt_is_computed_is_an_error() -> None:
    record = StreamRecord(STREAM)
    stream_batches(record, 10.0)
    with pytest.raises(NrankError, match="ended after 2 tokens, before a prompt of 5 was computed"):
        record.add(TokenBatch("stream", (7,), FinishReason.LENGTH, time_s=11.0))


@pytest.fixture(scope="module")
def system(embedded_model_dir: Path) -> Iterator[EngineSystem]:
    with ExitStack() as stack:
        yield EngineSystem.start(stack, EngineConfig(str(embedded_model_dir), step_tokens=64))


def test_an_aborted_stream_leaves_nothing_behind(system: EngineSystem) -> None:
    usable = usable_ids(4096, ())
    workload = StreamWorkload(
        "beside", random_prompt(usable, 0, 8), random_prompt(usable, 1, 200), 4, max_tokens=4000
    )
    check = Workload("check", (random_prompt(usable, 2, 20),), 6)
    before = system.run(check)
    first, second = system.run_beside(workload), system.run_beside(workload)
    assert system.run(check).token_ids == before.token_ids
    count = min(len(first.token_ids[0]), len(second.token_ids[0]))
    assert count >= 4 + 4 + 4  # 200 tokens take at least four steps of 64
    assert first.token_ids[0][:count] == second.token_ids[0][:count]
    assert first.token_ids[1] == second.token_ids[1]


@dataclass
class FakeEngine:
    """Answers each request with its prompt, after 2 s, one token a second."""

    calls: list[list[EngineRequest]] = field(default_factory=list)

    @property
    def rank0(self) -> FakeEngine:
        return self

    def snapshot(self) -> RankSnapshot:
        """A step of 20 ms for each call so far, 15 ms of them experts'."""
        count = len(self.calls)
        parts = {"experts": 0.015 * count}
        return RankSnapshot(
            0, 1, 0.0, count, busy_steps=count, step_seconds=0.02 * count, step_parts=parts
        )

    def generate(self, requests: Sequence[EngineRequest]) -> list[GenerationResult]:
        self.calls.append(list(requests))
        return [
            GenerationResult(
                r.request_id, r.prompt_ids, FinishReason.STOP, len(r.prompt_ids), 10, 4, 3,
                2.0, 1.0 + len(r.prompt_ids),
            )
            for r in requests
        ]  # fmt: skip


def test_prompts_in_turn_are_answered_one_at_a_time_to_their_end_tokens() -> None:
    engine = FakeEngine()
    system = EngineSystem(engine)  # type: ignore[arg-type]
    together = Workload("w", ((5, 6), (7, 8, 9)), 9)
    shared, alone = system.run(together), system.run(replace(TEXT, prompts=together.prompts))
    assert [[r.prompt_ids for r in call] for call in engine.calls] == [
        [(5, 6), (7, 8, 9)],
        [(5, 6)],
        [(7, 8, 9)],
    ]
    assert [call[0].ignore_eos for call in engine.calls] == [True, False, False]
    assert [call[0].stop_token_ids for call in engine.calls] == [(), (3,), (3,)]
    assert (shared.decode_s, alone.decode_s) == (2.0, 1.0 + 2.0)
    assert shared.token_ids == alone.token_ids == together.prompts
    assert (alone.cached_tokens, alone.draft_tokens, alone.accepted_tokens) == (20, 8, 6)
    split = StepSplit.of([shared.steps, alone.steps])
    assert split is not None
    assert (split.steps, split.step_ms) == (3, pytest.approx(20))
    assert split.parts_ms == {"experts": pytest.approx(15), "rest": pytest.approx(5)}


def test_a_system_that_tells_nothing_of_its_steps_has_no_split() -> None:
    assert StepSplit.of([None, None]) is None
    assert StepSplit.of([StepTimes(0, 0.0, {})]) is None


def test_the_steps_of_a_run_take_about_as_long_as_the_run(system: EngineSystem) -> None:
    workload = Workload("steps", (random_prompt(usable_ids(4096, ()), 3, 100),), 40)
    system.run(workload)
    began = time.perf_counter()
    run = system.run(workload)
    passed_s = time.perf_counter() - began
    assert run.steps is not None
    assert run.steps.steps == 2 + 39  # a budget of 64 tokens a step
    assert 0.5 * passed_s < run.steps.seconds < passed_s
    split = StepSplit.of([run.steps])
    assert split is not None
    assert sum(split.parts_ms.values()) == pytest.approx(split.step_ms)
    assert 0 <= split.parts_ms["rest"] < 0.1 * split.step_ms


def test_engines_of_a_rank_count_differ_in_one_setting_and_the_plain_one_has_neither(
    embedded_model_dir: Path,
) -> None:
    configs = plan_engines(str(embedded_model_dir), 2)
    assert (configs.plain.mtp, configs.plain.prefix_cache) == (0, False)
    assert replace(configs.drafting, mtp=0) == configs.plain
    assert replace(configs.reusing, prefix_cache=False) == configs.plain
    assert (configs.drafting.mtp, configs.reusing.prefix_cache) == (2, True)


def limits_of(model_dir: Path) -> ModelLimits:
    return ModelLimits.read(EngineConfig(str(model_dir)))


def test_texts_are_asked_through_the_chat_template_and_answered_to_their_end(
    embedded_model_dir: Path,
) -> None:
    tokenizer = Tokenizer.load(embedded_model_dir)
    texts = {text.name: text for text in make_texts(tokenizer, FULL)}
    assert list(texts) == ["counting", "retrieval", "prose", "noise"]
    for text in texts.values():
        assert len(set(text.prompts)) == 4
        # One step computes all four, or the decode rate of four requests would hold a prefill.
        assert sum(map(len, text.prompts)) <= EngineConfig("").step_tokens
    assert [text.name for text in texts.values() if text.has_end] == ["counting", "retrieval"]
    asked = tokenizer.decode(texts["retrieval"].prompts[3], skip_special=False)
    assert asked.startswith("<|im_start|>user\nThe workshop opens at seven")
    assert "\nThe secret code for garden is 31416.\n" in asked
    assert asked.endswith("What is the secret code for garden?<|im_end|>\n<|im_start|>assistant\n")
    limits = limits_of(embedded_model_dir)
    alone, together = texts["counting"].workloads(limits.end_token_ids, FULL)
    assert (alone.id, alone.concurrency, len(alone.prompts)) == ("counting-1", 1, 4)
    assert (together.id, together.concurrency) == ("counting-4", 4)
    assert alone.end_token_ids == limits.end_token_ids != ()
    assert texts["prose"].workloads(limits.end_token_ids, FULL)[0].end_token_ids == ()


@pytest.mark.parametrize(
    ("missing", "names", "reason"),
    [
        (
            ("tokenizer.json",),
            ["random-ids"],
            "drafts on text: the model has no tokenizer that can be used here",
        ),
        (
            ("chat_template.jinja",),
            ["prose", "noise", "random-ids"],
            "drafts on counting and retrieval: the model has no chat template",
        ),
    ],
)
def test_texts_that_can_not_be_made_are_left_out_with_one_line(
    embedded_model_dir: Path,
    tmp_path: Path,
    missing: Sequence[str],
    names: Sequence[str],
    reason: str,
) -> None:
    for file in embedded_model_dir.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in missing:
            (tmp_path / file.name).symlink_to(file)
    for file in embedded_model_dir.glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    limits = limits_of(tmp_path)
    found, left_out = draft_workloads(limits, usable_ids(4096, ()), QUICK)
    assert [w.id for w in found] == [f"{name}-{count}" for name in names for count in (1, 4)]
    assert left_out == [reason]


def test_without_a_draft_head_drafts_are_left_out_and_all_else_stays(
    embedded_model_dir: Path,
) -> None:
    configs = plan_engines(str(embedded_model_dir), 1)
    without = replace(configs, drafting=configs.plain)
    found = load_gain_workloads(limits_of(embedded_model_dir), FULL, without, repeats=5)
    assert found.drafts == []
    assert found.left_out == ["drafts: the model has no draft head that can be run"]
    prompts = {workload.prompts for workload in found.prefixes}
    assert len(prompts) == 6  # one more than repeats: the first warms up
    assert [len(prompt[0]) for prompt in prompts] == [1500] * 6


def test_what_the_context_is_too_short_for_is_left_out_with_a_line_each() -> None:
    workloads = GainWorkloads([TEXT], PREFIXES, [STREAM], ["x"])
    assert workloads.within(13) == workloads
    cut = workloads.within(6)
    assert (cut.drafts, cut.prefixes, cut.streams) == ([], PREFIXES, [])
    assert cut.left_out == [
        "x",
        "counting-1: needs a context of 11 tokens, the model has 6",
        "beside-5: needs a context of 13 tokens, the model has 6",
    ]
