"""The routes over the real engine: reuse, drafts and priorities in answers, status and metrics."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from cluster.coordinator import Coordinator, CoordinatorSettings
from cluster.ingress import make_app
from cluster.local_gang import LocalLauncher
from cluster.model_card import load_model_card
from cluster.tokens import Tokenizer
from placement.config import EngineConfig
from placement.models.registry import load_model_spec
from placement.plan import make_plan

MODEL = "tiny-flash-next"
CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
STORY = "Count from 3 to 40. " * 12  # many pages of 16 tokens
PAGE_TOKENS = 16
WAIT_S = 30.0

Body = Callable[["Server"], Awaitable[None]]


class Server:
    """The application and its client, in the event loop of the test."""

    def __init__(self, coordinator: Coordinator, http: httpx.AsyncClient) -> None:
        self.coordinator, self.http = coordinator, http

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.coordinator.check_alive()
                await asyncio.sleep(0.005)

    async def until_running(self) -> None:
        """Until a sequence runs: what comes now waits for it."""
        async with asyncio.timeout(WAIT_S):
            while True:
                if (await self.leader())["running"]:
                    return
                await asyncio.sleep(0.005)

    async def usage(self, url: str, stream: bool, text: str, max_tokens: int = 3) -> dict[str, Any]:
        """Sends `text` greedily; the usage that the answer tells, however it comes."""
        message = [{"role": "user", "content": text}]
        body = {"messages": message} if url == CHAT_URL else {"prompt": text}
        body |= {"model": MODEL, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
        if not stream:
            answer = await self.http.post(url, json=body)
            assert answer.status_code == 200, answer.text
            return dict(answer.json()["usage"])
        more = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await self.http.post(url, json={**body, **more})
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return dict(json.loads(lines[-1])["usage"])

    async def leader(self) -> dict[str, Any]:
        return dict((await self.http.get("/status")).json()["snapshots"][0])

    async def idle_leader(self) -> dict[str, Any]:
        """After the check when idle nothing changes any more."""
        async with asyncio.timeout(WAIT_S):
            while True:
                leader = await self.leader()
                if leader["integrity_checks"]:
                    return leader
                await asyncio.sleep(0.02)

    async def metrics(self, part: str) -> dict[str, float]:
        text = (await self.http.get("/metrics")).text
        lines = [line for line in text.splitlines() if part in line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.fixture
def serve(embedded_model_dir: Path, drive: Callable[..., None]) -> Callable[..., None]:
    """Runs a test body against a served gang of one rank, which is ended afterwards."""

    def run(body: Body, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "context_tokens": 512, "max_sequences": 2, "page_tokens": PAGE_TOKENS, "mtp": 2,
            "mtp_auto": False, "prefix_cache": True,
        }  # fmt: skip
        config = EngineConfig(str(embedded_model_dir), **{**settings, **changes})
        plan = make_plan(config, *load_model_spec(config.model_dir))
        coordinator = Coordinator(
            config,
            plan,
            lambda: LocalLauncher(config),
            CoordinatorSettings(snapshot_interval_s=0.01, model_id=MODEL),
        )
        card = load_model_card(embedded_model_dir, MODEL, 0, config.context_tokens)
        app = make_app(coordinator, card, Tokenizer.load(embedded_model_dir))

        async def served() -> None:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                server = Server(coordinator, http)
                coordinator.start()
                await server.until(lambda: coordinator.state.value == "serving")
                await body(server)
                await coordinator.close()

        drive(served())

    return run


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_cached_tokens_are_told_on_both_routes_whole_and_streamed(serve: Any) -> None:
    """0 on a miss, all full pages but the last token's on a repeat, the same in every mode."""

    async def body(server: Server) -> None:
        for url in (CHAT_URL, TEXT_URL):
            text = url + STORY
            first = await server.usage(url, stream=url == TEXT_URL, text=text)
            assert cached(first) == 0
            full = (first["prompt_tokens"] - 1) // PAGE_TOKENS * PAGE_TOKENS
            for stream in (False, True, False):
                again = await server.usage(url, stream, text)
                assert cached(again) == full > 0
                assert again["prompt_tokens"] == first["prompt_tokens"]
                assert again["completion_tokens"] == first["completion_tokens"] == 3

    serve(body)


def test_drafts_are_told_on_both_routes_whole_and_streamed(serve: Any) -> None:
    """The same prompt gives the same drafts, however the answer is sent."""

    async def body(server: Server) -> None:
        for url in (CHAT_URL, TEXT_URL):
            details = []
            for stream in (False, True):
                usage = await server.usage(url, stream, STORY, max_tokens=24)
                details.append(usage["completion_tokens_details"])
                accepted = details[-1]["accepted_prediction_tokens"]
                assert 0 < accepted < usage["completion_tokens"] == 24
                assert details[-1]["rejected_prediction_tokens"] >= 0
            assert details[0] == details[1]

    serve(body)


def test_without_reuse_and_drafts_the_details_are_zero(serve: Any) -> None:
    async def body(server: Server) -> None:
        for _ in range(2):
            usage = await server.usage(TEXT_URL, False, STORY)
            assert cached(usage) == 0
            assert set(usage["completion_tokens_details"].values()) == {0}
        leader = await server.leader()
        assert leader["prefix_cache"]["hit_rate"] is None
        assert leader["prefix_cache"]["cells"] == {"device": 0, "host": 0}
        assert leader["drafts"]["drafts_per_step"] == 0
        assert leader["drafts"]["estimated_speedup"] is None

    serve(body, mtp=0, prefix_cache=False)


def test_status_and_metrics_tell_hits_tiers_and_what_drafts_bring(serve: Any) -> None:
    async def body(server: Server) -> None:
        used = [await server.usage(TEXT_URL, False, STORY, 24) for _ in range(3)]
        leader = await server.idle_leader()
        told, drafts = leader["prefix_cache"], leader["drafts"]
        assert told["hits"] == sum(map(cached, used)) > 0
        assert told["queries"] == 1 + sum(one["prompt_tokens"] for one in used)  # the first step
        assert told["queries"] == told["hits"] + sum(told["misses"].values())
        assert told["hit_rate"] == pytest.approx(told["hits"] / told["queries"])
        assert told["misses"]["evicted"] == told["misses"]["no_state"] == 0
        assert told["states"]["device"] == told["events"]["saved"] > 0
        assert told["copies"]["save"]["count"] == told["events"]["saved"]
        assert told["copies"]["save"]["bytes"] * told["cells"]["device"] == (
            told["events"]["saved"] * told["cell_bytes"]["device"]
        )
        assert told["cached_pages"] > 0
        assert leader["recurrent_dtype"] == "float32"
        start = (await server.http.get("/status")).json()["start"]
        for tier, states in told["cells"].items():
            sizes = {"states": states, "rank_bytes": [told["cell_bytes"][tier]]}
            assert start["prefix_tiers"][tier] == sizes
        assert (start["drafts_per_step"], start["recurrent_dtype"]) == (2, "float32")
        memory = leader["memory_bytes"]
        assert start["draft_bytes"] == [memory["mtp_weights"] + memory["mtp_state"]]
        first, second = drafts["acceptance_by_position"]
        assert 1 >= first >= second > 0
        assert drafts["tokens_per_round"] == pytest.approx(1 + first + second)
        assert drafts["estimated_speedup"] > 0

        found = await server.metrics("nrank_prefix_cache_")
        label = f'{{model_name="{MODEL}"}}'
        misses = sum(value for name, value in found.items() if "misses" in name)
        assert found[f"nrank_prefix_cache_hits_total{label}"] == told["hits"]
        assert found[f"nrank_prefix_cache_queries_total{label}"] == told["hits"] + misses
        speedup = await server.metrics("estimated_speedup")
        assert list(speedup.values()) == [pytest.approx(drafts["estimated_speedup"])]

    serve(body)


def test_every_rank_tells_its_own_copies_and_memory(serve: Any) -> None:
    """Also those of the last steps before it fell idle, which it is asked about for as long."""

    async def body(server: Server) -> None:
        for _ in range(2):
            await server.usage(TEXT_URL, False, STORY)
        await server.idle_leader()
        async with asyncio.timeout(WAIT_S):
            while True:
                leader, other = (await server.http.get("/status")).json()["snapshots"]
                copies = other["prefix_cache"]["copies"]
                if copies["restore"]["count"]:
                    break
                await asyncio.sleep(0.02)
        for kind, told in leader["prefix_cache"]["copies"].items():
            assert copies[kind]["count"] == told["count"]
            assert (copies[kind]["bytes"] > 0) == (told["count"] > 0)
        assert other["prefix_cache"]["cells"] == leader["prefix_cache"]["cells"]
        assert all(size > 0 for size in other["prefix_cache"]["cell_bytes"].values())
        assert other["prefix_cache"]["misses"] == {}, "tokens are rank 0's to count"
        copied = await server.metrics("nrank_state_copy_bytes_total")
        name = 'nrank_state_copy_bytes_total{kind="restore",rank="1"}'
        assert copied[name] == copies["restore"]["bytes"]

    serve(body, ranks=2)


def test_the_least_priority_goes_first(serve: Any) -> None:
    """One sequence runs at a time; of those that wait, the later but more urgent one is next."""

    async def body(server: Server) -> None:
        ended: list[int] = []

        async def ask(priority: int, max_tokens: int) -> None:
            body = {"model": MODEL, "prompt": "The river", "priority": priority}
            body |= {"max_tokens": max_tokens, "ignore_eos": True}
            answer = await server.http.post(TEXT_URL, json=body)
            assert answer.status_code == 200, answer.text
            ended.append(priority)

        tasks = [asyncio.ensure_future(ask(0, 400))]
        await server.until_running()
        for count, priority in enumerate((7, 3, -2), 2):
            tasks.append(asyncio.ensure_future(ask(priority, 2)))
            await server.until(lambda count=count: server.coordinator.admitted == count)
        await asyncio.gather(*tasks)
        assert ended == [0, -2, 3, 7]

    serve(body, max_sequences=1)


def reference_loglikelihoods(model_dir: Path, whole: list[list[int]], last: int) -> list[float]:
    """Of the `last` tokens of each sequence, by transformers in fp32."""
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    sums = []
    for ids in whole:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0].double()
        found = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
        sums.append(float(found[-last:].sum()))
    return sums


@pytest.mark.slow
def test_loglikelihoods_of_an_evaluation_harness_are_the_models_own(
    serve: Any, embedded_model_dir: Path
) -> None:
    """As lm-eval asks (`local-completions`): ids in, echo, one token, one likely token a place.

    Context and continuation: 20 pairs, some longer than a prefill chunk; asked twice, so that
    prefixes are cached the second time.
    """
    tokenizer = Tokenizer.load(embedded_model_dir)
    text = (Path(__file__).parents[2] / "golden" / "prompt.txt").read_text()
    ids = tokenizer.encode(text)
    last = 4
    whole = [list(ids[at : at + length]) for at, length in zip(
        range(0, 200, 10), [40, 90, 200, 60, 300] * 4, strict=True
    )]  # fmt: skip
    expected = reference_loglikelihoods(embedded_model_dir, whole, last)

    async def body(server: Server) -> None:
        for _ in range(2):
            for one, right in zip(whole, expected, strict=True):
                request = {
                    "model": MODEL, "prompt": one, "temperature": 0, "max_tokens": 1,
                    "logprobs": 1, "seed": 1234, "echo": True,
                }  # fmt: skip
                answer = await server.http.post(TEXT_URL, json=request)
                told = answer.json()["choices"][0]["logprobs"]
                assert len(told["tokens"]) == len(told["top_logprobs"]) == len(one) + 1
                found = sum(told["token_logprobs"][len(one) - last : len(one)])
                assert abs(found - right) < 1e-3
                likely = [
                    max(top, key=top.__getitem__) for top in told["top_logprobs"][-last - 1 : -1]
                ]
                assert all(isinstance(token, str) for token in likely)

    serve(body, step_tokens=64)
