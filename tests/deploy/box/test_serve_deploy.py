"""`serve deploy deploy/serve.yaml` on a Ray that stands by itself, chips emulated."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from tests.deploy.box.standing_ray import ROOT, StandingRay, standing_ray

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

RANKS = 2
PROMPT = "The river"


@pytest.fixture(scope="module")
def ray_of_two():
    """As many chips as ranks: a second gang beside the first one would find none."""
    with standing_ray(RANKS) as ray:
        yield ray


def adapted(ray: StandingRay, folder: Path, **args: Any) -> Path:
    """deploy/serve.yaml with the port of this test, chips that Ray knows as NPU, and `args`."""
    document = yaml.safe_load((ROOT / "deploy/serve.yaml").read_text())
    document["http_options"]["port"] = ray.http_port
    [application] = document["applications"]
    application["args"] |= {"resource_name": "NPU", **args}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def body(max_tokens: int, **more: Any) -> dict[str, Any]:
    common = {"model": "tiny-flash-next", "temperature": 0, "ignore_eos": True}
    return {**common, "prompt": PROMPT, "max_tokens": max_tokens, **more}


def test_it_serves_the_golden_ids_is_replaced_in_place_and_drains(
    ray_of_two, golden, embedded_model_dir, tmp_path
):
    ray = ray_of_two
    ray.deploy(adapted(ray, tmp_path))
    ray.until("readiness", ray.is_ready)
    told = ray.status()
    assert len({rank["physical_chip"] for rank in told["ranks"]}) == RANKS
    assert all(rank["cpus"] for rank in told["ranks"])
    case = next(case for case in golden("embedded").cases.values() if len(case.prompt_ids) > 20)
    ids = case.token_ids[: min(16, case.comparable())]
    answer = ray.post("/v1/completions", body(len(ids), prompt=list(case.prompt_ids))).json()
    tokenizer = Tokenizer.from_file(str(embedded_model_dir / "tokenizer.json"))
    assert answer["choices"][0]["text"] == tokenizer.decode(ids)

    ray.deploy(adapted(ray, tmp_path, max_queue_requests=7))
    ray.until("the new gang", lambda: queue_bound(ray) == 7 and ray.is_ready())
    assert ray.post("/v1/completions", body(4)).status_code == 200

    long: list[Any] = []
    stream = threading.Thread(target=lambda: long.append(ray.post("/v1/completions", body(400))))
    stream.start()
    ray.until("a running answer", lambda: ray.status()["running"] == 1)
    ray.stop_serve()
    stream.join()
    assert long[0].status_code == 200, long[0].text
    assert long[0].json()["usage"]["completion_tokens"] == 400
    ray.until("its end", lambda: ray.get("/health") is None)
    ray.end()
    assert ray.left_after(60.0) == []


def queue_bound(ray: StandingRay) -> int | None:
    return ray.status().get("config", {}).get("max_queue_requests")
