"""Asks a running server for a few answers and checks them: `python -m deploy.smoke_job`.

A Ray job needs no device and no torch: `ray job submit --working-dir . -- python -m
deploy.smoke_job --base-url http://127.0.0.1:8000`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

TIMEOUT_S = 120.0
PROMPT = "The capital of France is"


class SmokeFailure(Exception):
    """A check that the server did not pass."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="smoke_job",
        description="Send a few requests to a running nrank server and check the answers.",
        epilog="example: python -m deploy.smoke_job --base-url http://127.0.0.1:8000",
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="U")
    parser.add_argument("--max-tokens", type=int, default=8, metavar="N")
    arguments = parser.parse_args(argv)
    base_url = arguments.base_url.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(base_url=base_url, timeout=TIMEOUT_S) as client:
            report = check(client, arguments.max_tokens)
    except (SmokeFailure, httpx.HTTPError) as error:
        print(f"smoke_job: {base_url}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report))
    return 0


def check(client: httpx.Client, max_tokens: int) -> dict[str, Any]:
    """Readiness, model list, a plain answer twice, and the same answer as a stream."""
    require(client.get("/ready").status_code == 200, "the server is not ready")
    models = answer(client.get("/v1/models"))["data"]
    require(len(models) == 1, f"expected one model, found {len(models)}")
    body = {
        "model": models[0]["id"],
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    first = answer(client.post("/v1/completions", json=body))
    tokens, text = first["usage"]["completion_tokens"], first["choices"][0]["text"]
    require(tokens == max_tokens, f"asked for {max_tokens} tokens, got {tokens}")
    again = answer(client.post("/v1/completions", json=body))["choices"][0]["text"]
    require(again == text, f"greedy answers differ: {text!r} and {again!r}")
    streamed = "".join(stream(client, {**body, "stream": True}))
    require(streamed == text, f"stream differs from the plain answer: {streamed!r} and {text!r}")
    return {"model": models[0]["id"], "text": text, "completion_tokens": tokens}


def stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """Texts of a streamed completion; the stream must end with its end mark."""
    ended = False
    with client.stream("POST", "/v1/completions", json=body) as response:
        require(response.status_code == 200, f"stream answered {response.status_code}")
        for line in response.iter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                require("error" not in event, f"stream ended with {event.get('error')}")
                yield from (choice["text"] for choice in event["choices"])
    require(ended, "the stream ended without [DONE]")


def answer(response: httpx.Response) -> Any:
    require(response.status_code == 200, f"{response.url} answered {response.text[:300]}")
    return response.json()


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SmokeFailure(message)


if __name__ == "__main__":
    sys.exit(main())
