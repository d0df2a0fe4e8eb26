"""The status page in a real browser, of a served gang of four ranks with sensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from cluster.status_page import DASH
from deploy.config import load_config
from tests.serve.browser import PHONE, chromium
from tests.serve.scripted_sensor import ScriptedSensor

pytestmark = [pytest.mark.ray]

RANKS = 4
LIMIT_MS = 30_000.0


@pytest.fixture(scope="module")
def gang(serve_port: int) -> Iterator[Any]:
    from ray import serve

    from deploy.serve import application
    from tests.serve.conftest import Server, quiet

    config = load_config(
        overrides={
            "ranks": RANKS, "resource_name": "NPU", "port": serve_port, "sensors": "on",
            "context_tokens": 2048, "max_sequences": 2,
        }
    )  # fmt: skip
    serve.run(application(config), name="page", route_prefix="/page", logging_config=quiet())
    server = Server(f"http://127.0.0.1:{serve_port}/page")
    server.wait_ready()
    yield server
    serve.delete("page")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Browser, gang: Any, sensor: ScriptedSensor) -> Iterator[Page]:
    """The page with the sensors read. Whatever a console would show of it fails the test."""
    sensor.heat(0, 50)
    context = browser.new_context(color_scheme="light")
    context.set_default_timeout(LIMIT_MS)
    expect.set_options(timeout=LIMIT_MS)
    page = context.new_page()
    told: list[str] = []
    asked: set[str] = set()
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("request", lambda request: asked.add(request.url))
    page.goto(f"{gang.base_url}/status")
    expect(page.locator(".rank", has_text="50 °C")).to_have_count(RANKS)
    yield page
    context.close()
    assert told == []
    assert {url for url in asked if not url.startswith("data:")} == {f"{gang.base_url}/status"}


def rank(page: Page, index: int) -> Locator:
    return page.locator(f".rank[data-rank='{index}']")


def test_four_ranks_with_heat_and_memory(page: Page, gang: Any) -> None:
    expect(page).to_have_title("serving · tiny-flash-next")
    status = gang.status()
    for told in status["ranks"]:
        chip = told["physical_chip"]
        card = rank(page, told["rank"])
        expect(card).to_contain_text("running")
        expect(card).to_contain_text(f"Chip{2 + chip // 2}.{chip % 2} ({chip})")
        expect(card).to_contain_text(f"Utilisation{10 + chip} %")
        expect(card).to_contain_text("of 43.24 GiB")
        memory = card.get_by_text("planned").inner_text()
        assert DASH not in memory
        assert "MiB" in memory
        assert card.locator(".plan").first.bounding_box()["width"] > 0
    for name in ("plan_id", "config_hash", "revision"):
        expect(page.locator("main")).to_contain_text(status[name])


def test_it_renews_itself(page: Page, gang: Any, sensor: ScriptedSensor) -> None:
    page.evaluate("window.sameDocument = true")
    hot = gang.status()["ranks"][2]["physical_chip"]
    sensor.heat(hot, 77)
    expect(rank(page, 2)).to_contain_text("77 °C")
    expect(rank(page, 1)).to_contain_text("50 °C")
    assert page.evaluate("window.sameDocument") is True


def test_it_fits_a_phone_in_light_and_dark(page: Page) -> None:
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(back) != light


def test_a_hold_by_hand_is_taken_from_this_machine_and_shown(page: Page, gang: Any) -> None:
    assert gang.http.post("/admin/hold", json={"reason": "<i>a card</i>"}).status_code == 200
    expect(page.locator("#state")).to_have_text("hold")
    expect(page.locator("#reason")).to_have_text("<i>a card</i>")
    assert gang.http.post("/admin/resume").json()["order"] == "run"
    expect(page.locator("#state")).to_have_text("serving")


def test_serves_proxy_passes_on_who_the_caller_is(gang: Any) -> None:
    """The rule for callers without a token rests on it."""
    transport = httpx.HTTPTransport(local_address="127.0.0.9")
    with httpx.Client(base_url=gang.base_url, transport=transport) as http:
        refused = http.post("/admin/hold", headers={"Via": "1.1 proxy"})
    assert refused.status_code == 403
    assert "not from 127.0.0.9;" in refused.json()["error"]["message"]
    forwarded = gang.http.post("/admin/hold", headers={"X-Forwarded-For": "127.0.0.1"})
    assert forwarded.status_code == 403
    assert gang.status()["heat"]["held_by_hand"] is False


def test_a_token_file_is_read_before_anything_starts(tmp_path: Path) -> None:
    from deploy.serve import admin_gate
    from placement.errors import ConfigError

    path = tmp_path / "token"
    config = load_config(overrides={"admin_token_file": str(path)})
    with pytest.raises(ConfigError, match="can't read admin_token_file"):
        admin_gate(config)
    path.write_text("5" * 64)
    assert admin_gate(config).token_file == str(path)
