"""Any sequence of requests and disturbances, under any limits: hypothesis looks for a bad one."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rank_worker.messages import EngineRequest
from rank_worker.scheduler import SchedulerLimits
from tests.rank_worker.fake_device import FakeDevice
from tests.rank_worker.test_prefix_soak import World

EXAMPLES, STEPS = 150, 40
TOKENS = st.integers(0, 3)
PICK = st.integers(0, 20)
ANSWER = st.integers(1, 10)
PRIORITY = st.sampled_from([0, 0, 1, -1])


@st.composite
def any_limits(draw: st.DrawFn) -> SchedulerLimits:
    """From a pool of barely one context to a roomy one."""
    page = draw(st.integers(2, 4))
    context = draw(st.integers(10, 32))
    least = -(-context // page)
    return SchedulerLimits(
        step_tokens=draw(st.integers(1, 20)),
        prefill_chunk_tokens=draw(st.integers(0, 6)),
        page_tokens=page,
        num_pages=least + draw(st.sampled_from([0, 1, 2, 4, least, 3 * least])),
        num_slots=draw(st.integers(1, 4)),
        context_tokens=context,
        check_interval_steps=3,
        num_drafts=draw(st.integers(0, 4)),
        drafts_auto=draw(st.booleans()),
        prefix_states=draw(st.integers(1, 5)),
        prefix_host_states=draw(st.integers(0, 4)),
        prefix_interval_tokens=page * draw(st.sampled_from([1, 2, 3, 1000])),
        decode_share=draw(st.sampled_from([0.0, 0.5, 0.9])),
    )


class PrefixMachine(RuleBasedStateMachine):
    """Every step is checked by `Run`, every answer by `World`."""

    @initialize(limits=any_limits(), seed=st.integers(0, 2**32 - 1), late_compute=st.booleans())
    def start(self, limits: SchedulerLimits, seed: int, late_compute: bool) -> None:
        self.world = World(limits, FakeDevice(limits, seed, late_compute))
        self.prompts: list[tuple[int, ...]] = []

    def add(self, tokens: list[int], answer: int, priority: int, is_scored: bool = False) -> None:
        prompt = tuple(tokens[: self.world.limits.context_tokens - 1])
        self.prompts.append(prompt)
        name = f"r{len(self.prompts)}"
        self.world.add(
            EngineRequest(name, prompt, answer, priority=priority, prompt_logprobs=is_scored)
        )

    @rule(prompt=st.lists(TOKENS, min_size=1, max_size=30), answer=ANSWER, priority=PRIORITY)
    def new(self, prompt: list[int], answer: int, priority: int) -> None:
        self.add(prompt, answer, priority)

    @precondition(lambda self: self.world.known)
    @rule(which=PICK, tail=st.lists(TOKENS, max_size=8), answer=ANSWER, priority=PRIORITY)
    def extend(self, which: int, tail: list[int], answer: int, priority: int) -> None:
        """The next turn of a conversation."""
        known = self.world.known
        self.add([*known[which % len(known)], *tail], answer, priority)

    @precondition(lambda self: self.prompts)
    @rule(
        which=PICK, length=st.integers(1, 30), tail=st.lists(TOKENS, max_size=8), answer=ANSWER,
        priority=PRIORITY, is_scored=st.booleans(),
    )  # fmt: skip
    def fork(
        self, which: int, length: int, tail: list[int], answer: int, priority: int, is_scored: bool
    ) -> None:
        """Begins as an earlier prompt or answer does."""
        known = [*self.prompts, *self.world.known]
        self.add([*known[which % len(known)][:length], *tail], answer, priority, is_scored)

    @rule(kind=st.sampled_from(["waiting", "running", "in flight"]), which=PICK)
    def cancel(self, kind: str, which: int) -> None:
        self.world.cancel(kind, which)

    @rule(seconds=st.sampled_from([0.001, 0.002, 0.1]), count=st.integers(1, 4))
    def step(self, seconds: float, count: int) -> None:
        for _ in range(count):
            self.world.step(seconds)

    @rule(which=PICK)
    def spoil(self, which: int) -> None:
        """A row's logits are not finite."""
        self.world.step(spoil=which)

    @rule(slot=PICK)
    def strike(self, slot: int) -> None:
        """What a sequence computes in a step is not finite, whether anybody looks at it or not."""
        self.world.strike(slot)

    @rule()
    def idle(self) -> None:
        self.world.finish()

    def teardown(self) -> None:
        if self.world.is_sound:
            self.world.close()


def test_any_traffic_under_any_limits() -> None:
    run_state_machine_as_test(
        PrefixMachine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=STEPS, derandomize=True, deadline=None,
            phases=[Phase.generate, Phase.shrink], database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
