"""What HTTP, Serve and Ray take of the engine's rate: `python -m tests.serve.overhead`.

The engine alone (`launch_engine`) and a real `nrank serve` of the same configuration, in turns on
the same machine: tokens a second of 1 and of 4 requests from the send to the last token, and the
time to the first token. Prints medians, the load of the machine, and processor time a token, which
other work on the machine hardly changes: of the engine alone (exact for one rank), of the server's
ranks, and of all other processes of its Ray. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from cluster.tokens import Tokenizer
from deploy.config import load_config
from rank_worker.launch import Engine, launch_engine
from rank_worker.messages import EngineRequest
from tests.serve.front import served

PROMPT = "The river"
COUNTS = (1, 4)
LIMIT_S = 300.0

TICKS = os.sysconf("SC_CLK_TCK")

Sample = tuple[float, list[float]]  # tokens a second of all requests; ttft of each in seconds
Measure = Callable[[int, int], Sample]


def cpu_seconds() -> dict[str, float]:
    """Processor time so far of this process ("engine"), of the server's ranks and of its rest."""
    ours = os.environ["RAY_AUTH_TOKEN_PATH"].encode()
    found = {"engine": time.process_time(), "ranks": 0.0, "http": 0.0}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
            figures = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if ours in environment:
            kind = "ranks" if title.startswith(b"ray::RankWorker") else "http"
            found[kind] += (int(figures[11]) + int(figures[12])) / TICKS  # user, system
    return found


def engine_sample(engine: Engine, prompt_ids: tuple[int, ...]) -> Measure:
    def measure(count: int, tokens: int) -> Sample:
        names = [f"{time.monotonic()}-{index}" for index in range(count)]
        requests = [EngineRequest(n, prompt_ids, tokens, ignore_eos=True) for n in names]
        results = engine.generate(requests)
        rate = count * tokens / max(result.last_token_s for result in results)
        return rate, [result.ttft_s for result in results]

    return measure


def server_sample(address: tuple[str, int], pool: ThreadPoolExecutor) -> Measure:
    """The client is as plain as one can be: its own processor time would count as the server's."""
    local = threading.local()

    def ask(tokens: int) -> tuple[float, float]:
        body = json.dumps({
            "model": "tiny-flash-next", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True,
        })  # fmt: skip
        if not hasattr(local, "socket"):
            local.socket = socket.create_connection(address, LIMIT_S)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address[0]}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        begun_s, first_s, text = time.monotonic(), 0.0, b""
        local.socket.sendall((head + body).encode())
        while not text.endswith(b"\r\n0\r\n\r\n"):  # the end of a chunked answer
            part = local.socket.recv(65536)
            assert part, "a stream ended without its last event"
            text += part
            if not first_s and b"data: {" in text:
                first_s = time.monotonic() - begun_s
        ended_s = time.monotonic() - begun_s
        assert text.count(b"data: [DONE]") == 1, text
        assert b'"error"' not in text, text
        return first_s, ended_s

    def measure(count: int, tokens: int) -> Sample:
        begun_s = time.monotonic()
        ends = list(pool.map(ask, [tokens] * count))
        return count * tokens / (time.monotonic() - begun_s), [first_s for first_s, _ in ends]

    return measure


def address(base_url: str) -> tuple[str, int]:
    parts = urlsplit(base_url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def run(repeats: int, tokens: int, ranks: int) -> dict[str, float]:
    overrides = {"ranks": ranks, "prefix_cache": False, "context_tokens": 4096}
    config = load_config(overrides=overrides)
    ids = tuple(Tokenizer.load(config.model).encode(PROMPT))
    with (
        launch_engine(config.engine()) as engine,
        served(overrides) as base_url,
        ThreadPoolExecutor(max(COUNTS)) as pool,
    ):
        sides = {
            "engine": engine_sample(engine, ids),
            "server": server_sample(address(base_url), pool),
        }
        found: dict[tuple[str, int], list[Sample]] = {}
        for measure in sides.values():
            measure(max(COUNTS), 16)
        used: dict[tuple[str, str, int], float] = {}
        for _ in range(repeats):
            for count in COUNTS:
                for side, measure in sides.items():
                    before = cpu_seconds()
                    found.setdefault((side, count), []).append(measure(count, tokens))
                    for kind, seconds in cpu_seconds().items():
                        name = (side, kind, count)
                        used[name] = used.get(name, 0.0) + seconds - before[kind]
    figures: dict[str, float] = {}
    for side, kind in (("engine", "engine"), ("server", "ranks"), ("server", "http")):
        for count in COUNTS:
            ms = used[side, kind, count] * 1000 / (repeats * count * tokens)
            figures[f"{kind}_{count}_cpu_ms_per_token"] = ms
    for (side, count), samples in found.items():
        figures[f"{side}_{count}_tokens_per_s"] = statistics.median(rate for rate, _ in samples)
        firsts = [first for _, ttfts in samples for first in ttfts]
        figures[f"{side}_{count}_ttft_p50_ms"] = statistics.median(firsts) * 1000
    for count in COUNTS:
        ratios = [
            server[0] / engine[0]
            for engine, server in zip(found["engine", count], found["server", count], strict=True)
        ]
        figures[f"ratio_{count}"] = statistics.median(ratios)
        figures[f"ttft_overhead_{count}_ms"] = (
            figures[f"server_{count}_ttft_p50_ms"] - figures[f"engine_{count}_ttft_p50_ms"]
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    figures = run(arguments.repeats, arguments.tokens, arguments.ranks)
    for name, value in figures.items():
        print(f"{name:28} {value:8.2f}")
    load = {"load_before": before, "load_after": os.getloadavg()[0]}
    print(json.dumps({**figures, **load}))


if __name__ == "__main__":
    main()
