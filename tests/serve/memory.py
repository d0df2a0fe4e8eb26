"""Memory of every process over many requests: `python -m tests.serve.memory --requests 2000`.

A real `nrank serve` with more different prompts than its caches hold. Prints the resident size of
ranks, coordinator, ingress and proxy and its slope in KiB per 1,000 requests after the first
fifth, in which caches and allocators fill. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.serve.front import served

CONFIG = {"ranks": 2, "max_sequences": 4, "context_tokens": 2048, "kv_pool_tokens": 16384}
NAMES = ("RankWorker", "ServeReplica:nrank:Coordinator", "ServeReplica:nrank:Ingress", "ProxyActor")
WORKERS = 4
SAMPLES = 40
LIMIT_S = 120.0


def resident_kib() -> dict[str, int]:
    """By name and pid, of this server's Ray."""
    ours = os.environ["RAY_AUTH_TOKEN_PATH"].encode()
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        name = next((name for name in NAMES if title.startswith(f"ray::{name}")), None)
        if name is not None and ours in environment:
            found[f"{name} {pid}"] = int(status.partition("VmRSS:")[2].split()[0])
    return found


def ask(client: httpx.Client, number: int) -> None:
    rng = random.Random(number)
    words = [rng.choice(("river", "snow", "Anna", "count", "sea", "hill")) for _ in range(30)]
    body = {
        "model": "tiny-flash-next", "prompt": f"{number} " + " ".join(words), "max_tokens": 8,
        "ignore_eos": True, "stream": number % 2 == 0,
    }  # fmt: skip
    if number % 10 == 9:  # some leave
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            next(answer.iter_lines())
        return
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


def slope(points: list[tuple[int, int]]) -> float:
    """KiB per 1,000 requests: Theil and Sen's median of all pairs, deaf to single steps."""
    pairs = [(a, b) for i, a in enumerate(points) for b in points[i + 1 :]]
    return statistics.median(1000 * (b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    total = parser.parse_args().requests
    points: dict[str, list[tuple[int, int]]] = {}
    with (
        served(CONFIG) as base_url,
        httpx.Client(base_url=base_url, timeout=LIMIT_S) as client,
        ThreadPoolExecutor(WORKERS) as pool,
    ):
        for first in range(0, total, total // SAMPLES):
            numbers = range(first, first + total // SAMPLES)
            list(pool.map(lambda number: ask(client, number), numbers))
            for name, size in resident_kib().items():
                points.setdefault(name, []).append((numbers[-1] + 1, size))
    figures = {}
    for name, sizes in points.items():
        late = [point for point in sizes if point[0] > total // 5]
        figures[name] = {"kib": sizes[-1][1], "kib_per_1000": round(slope(late), 1)}
        print(f"{name:44} {late[0][1]:8} to {late[-1][1]:8} KiB, slope {slope(late):8.1f}")
    print(json.dumps({"requests": total, "load": os.getloadavg()[0], "processes": figures}))


if __name__ == "__main__":
    main()
