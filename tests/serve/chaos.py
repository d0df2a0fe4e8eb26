"""Random faults under random traffic: `python -m tests.serve.chaos --minutes 30 --seed 1`.

A real `nrank serve`. Clients send requests whose greedy answers are known from a calm start, some
leave early, some come in bursts, some bring long prompts; meanwhile ranks are killed or stopped for
a while. Every request must end in time, with the calm answer or with an error that says why. At
the end the server is calm again: the same answers, nothing in use, a clean exit. The last line is
JSON; the exit code is 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from tests.serve.front import served

CONFIG = {
    "ranks": 2, "max_sequences": 4, "max_queue_requests": 16, "step_timeout_s": 5.0,
    "restart_limit": 1_000_000, "restart_backoff_s": 0.2, "context_tokens": 8192,
}  # fmt: skip
CLIENTS = 5
HANG_S = 240.0  # of one request from the first byte sent to the last one read
READY_S = 180.0
REST = (5.0, 25.0)  # seconds between two faults
RETRY_S = 1.0  # after a refusal
REFUSED = {"not_ready", "queue_full"}
ALLOWED = {"rank_failure", *REFUSED}  # errors that a fault or a crowd explains


@dataclass(frozen=True)
class Question:
    prompt: str
    max_tokens: int

    def body(self) -> dict[str, Any]:
        return {
            "model": "tiny-flash-next", "prompt": self.prompt, "max_tokens": self.max_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip


QUESTIONS = [
    *(Question(f"{name} went to the", 8 + 12 * i) for i, name in enumerate(("Anna", "Ben", "Eva"))),
    *(Question(f"Count from {i} to {i + 9}.", 60) for i in range(4)),
    Question("The river", 200),
    Question("The river runs to the sea. " * 150, 20),
    Question("Snow fell on the hills. " * 300, 8),
]


class Chaos:
    def __init__(self, base_url: str, seed: int) -> None:
        self.base_url = base_url
        self.rng = random.Random(seed)
        self.seeds = iter(self.rng.sample(range(1 << 30), 1 << 10))
        self.ends: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.calm: dict[Question, str] = {}
        self.over = threading.Event()
        self.lock = threading.Lock()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.base_url, timeout=HANG_S)

    def status(self) -> dict[str, Any]:
        with self.client() as http:
            return dict(http.get("/status").json())

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + READY_S
        while not self.status().get("ready"):
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not ready within {READY_S:g} s: {self.status()}")
            time.sleep(0.2)

    def note(self, end: str, wrong: str = "") -> None:
        with self.lock:
            self.ends[end] += 1
            if wrong:
                self.wrong.append(wrong)

    def ask(self, http: httpx.Client, question: Question, leave_after: int = -1) -> tuple[str, str]:
        """How it ended ("whole", "left", or the code of its error) and the text that came."""
        begun_s, text = time.monotonic(), ""
        with http.stream("POST", "/v1/completions", json=question.body()) as answer:
            if answer.status_code != 200:
                return json.loads(answer.read())["error"]["code"], ""
            for count, line in enumerate(answer.iter_lines()):
                if time.monotonic() - begun_s > HANG_S:
                    return "hang", text
                if count == leave_after:
                    return "left", text
                if line == "data: [DONE]":
                    return "whole", text
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return str(event["error"]["code"]), text
                    text += "".join(choice["text"] for choice in event["choices"])
        return "cut", text

    def judge(self, question: Question, end: str, text: str) -> None:
        calm = self.calm[question]
        is_right = text == calm if end == "whole" else calm.startswith(text)
        if end not in {"whole", "left", *ALLOWED}:
            self.note(end, f"{question.prompt[:30]!r} ended with {end}")
        elif is_right:
            self.note(end)
        else:
            self.note("wrong", f"{question.prompt[:30]!r} ({end}): {text!r} is not {calm!r}")

    def traffic(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.over.is_set():
            with self.client() as http:
                for _ in range(rng.choice((1, 1, 3, 8))):
                    self.one(http, rng)
            self.over.wait(rng.choice((0.0, 0.2, 1.0)))

    def one(self, http: httpx.Client, rng: random.Random) -> None:
        question = rng.choice(QUESTIONS)
        leave_after = rng.randrange(8) if rng.random() < 0.2 else -1
        try:
            end, text = self.ask(http, question, leave_after)
        except httpx.TimeoutException:
            end, text = "hang", ""
        except httpx.TransportError as error:
            end, text = f"transport {type(error).__name__}", ""
        self.judge(question, end, text)
        if end in REFUSED:
            self.over.wait(RETRY_S)

    def burst(self) -> None:
        seeds = [next(self.seeds) for _ in range(30)]

        def once(seed: int) -> None:
            with self.client() as http:
                self.one(http, random.Random(seed))

        threads = [threading.Thread(target=once, args=(seed,), daemon=True) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
            if thread.is_alive():
                self.note("hang", "a request of a burst did not end")

    def fault(self) -> None:
        kind = self.rng.choice(("kill", "kill", "pause", "long pause", "burst"))
        self.faults[kind] += 1
        if kind == "burst":
            self.burst()
            return
        ranks = self.status().get("ranks") or ()
        if not ranks:
            return
        pid = self.rng.choice(ranks)["pid"]
        with suppress(ProcessLookupError):
            if kind == "kill":
                os.kill(pid, signal.SIGKILL)
                return
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.rng.uniform(0.1, 2.0) if kind == "pause" else 9.0)
            os.kill(pid, signal.SIGCONT)

    def run(self, minutes: float) -> None:
        with self.client() as http:
            for question in QUESTIONS:
                end, self.calm[question] = self.ask(http, question)
                assert end == "whole", end
        threads = [
            threading.Thread(target=self.traffic, args=(next(self.seeds),), daemon=True)
            for _ in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        end_s = time.monotonic() + 60 * minutes
        told_s = time.monotonic()
        while time.monotonic() < end_s:
            time.sleep(self.rng.uniform(*REST))
            self.fault()
            if time.monotonic() - told_s > 60:
                told_s = time.monotonic()
                print(time.strftime("%H:%M:%S"), self.summary(), flush=True)
        self.over.set()
        for thread in threads:
            thread.join(HANG_S)
            if thread.is_alive():
                self.note("hang", "a client did not end")
        self.calm_again()

    def calm_again(self) -> None:
        self.wait_ready()
        with self.client() as http:
            for question in QUESTIONS:
                self.judge(question, *self.ask(http, question))
        deadline_s = time.monotonic() + READY_S
        keys = ("running", "waiting", "slots_used", "pages_used")
        while any(self.status()["snapshots"][0][key] for key in keys):
            if time.monotonic() > deadline_s:
                self.wrong.append(f"still in use: {self.status()['snapshots'][0]}")
                return
            time.sleep(0.1)

    def summary(self) -> str:
        status = self.status()
        told = {"ends": dict(self.ends), "faults": dict(self.faults), "wrong": len(self.wrong)}
        return json.dumps({**told, "restarts": status.get("restarts"), "load": os.getloadavg()[0]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with served(CONFIG) as base_url:
        chaos = Chaos(base_url, arguments.seed)
        chaos.run(arguments.minutes)
        summary = chaos.summary()
    for line in chaos.wrong[:50]:
        print(line)
    print(summary)
    return 1 if chaos.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
