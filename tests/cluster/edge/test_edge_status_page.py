"""The page that a browser gets at /status: what it says, and what it leaves open."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html import unescape
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cluster.client import EngineState, EngineStatus, HeatStatus, NotServing, RankStatus
from cluster.failure import Failure
from cluster.status_page import StatusPage, wants_page
from cluster.token_rates import Rates, TokenRates
from rank_worker.device_sensors.reading import CardReading, ChipReading
from rank_worker.messages import RankSnapshot

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
GIB = 1 << 30
CHIP = ChipReading(5, 1, 3, temperature_celsius=88.0, core_utilisation_ratio=0.25, health="ok")
RANK = RankStatus(
    0, "running", pid=4711, physical_chip=3, heartbeat_age_s=0.44, usable_bytes=40 * GIB,
    planned_bytes=30 * GIB, measured_bytes=20 * GIB, chip=CHIP,
)  # fmt: skip
STATUS = EngineStatus(
    EngineState.SERVING, True, model_id="m", plan_id="p1", config_hash="c1", revision="r1",
    device="cpu", world_size=1, epoch=2, restarts=1, max_sequences=8, running=3, waiting=4,
    configured_tokens=8192, allocated_tokens=4096, ranks=(RANK,),
    config={"hold_celsius": 94.0, "resume_celsius": 85.0},
)  # fmt: skip
SNAPSHOT = RankSnapshot(0, 2, 100.0, 12345)
DASH = "\N{EN DASH}"


def html_of(status: EngineStatus = STATUS, *snapshots: RankSnapshot) -> str:
    return bytes(StatusPage().response(status, snapshots).body).decode()


def words(html: str) -> str:
    """The text as it is read, blanks made one."""
    body = re.sub(r"<(style|script|noscript)\b.*?</\1>", "", html, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


@pytest.mark.parametrize(
    ("accept", "page"),
    [
        (BROWSER, True),
        ("text/html", True),
        ("TEXT/HTML; charset=utf-8 ;q=0.5", True),
        ("*/*", False),
        ("", False),
        ("application/json", False),
        ("application/json, text/html;q=0.9", False),
        ("application/json;q=0.1,text/html;q=0.9", True),
        ("text/html;q=0", False),
        ("text/html;q=x", False),
    ],
)
def test_who_gets_the_page(accept: str, page: bool) -> None:
    assert wants_page(accept) is page


def test_one_address_has_both(client: TestClient, engine: Any) -> None:
    engine.state = STATUS
    page = client.get("/status", headers={"Accept": BROWSER})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["cache-control"] == "no-store"
    told = client.get("/status")
    assert told.json()["ranks"][0]["chip"]["temperature_celsius"] == 88.0
    assert page.headers["vary"] == told.headers["vary"] == "Accept"


def test_what_it_says() -> None:
    text = words(html_of(STATUS, SNAPSHOT))
    for part in (
        "m serving", "3 running, of at most 8", "4 waiting", "1 restarts", "Rank 0 running",
        "Temperature 88 °C", "Health ok", "Utilisation 25 %", "Heartbeat 0.4 s ago", "Step 12,345",
        "Chip 5.1 (3)", "planned 30.00 GiB · measured 20.00 GiB of tensors · limit 40.00 GiB",
        "Order run", "Held by hand no", "None since the server started.", "Ranks 1 on cpu",
        "Context configured 8,192", "Context allocated 4,096", f"Context certified {DASH}",
        "Plan p1", "Configuration c1", "Revision r1", "Gang 2",
    ):  # fmt: skip
        assert part in text


def test_evidence_is_told_with_what_is_wrong_with_it() -> None:
    text = words(html_of(replace(STATUS, certified_tokens=2048)))
    assert "Context certified 2,048 Plan p1" in text
    text = words(html_of(replace(STATUS, certified_warning="plan_id was a, is <b>")))
    assert f"Context certified {DASH} Evidence plan_id was a, is <b> Plan p1" in text


def test_bars_are_as_long_as_the_figures() -> None:
    html = html_of()
    assert 'class="plan" width="75.00%"' in html
    assert 'class="use" y="50%" width="50.00%"' in html
    over = html_of(replace(STATUS, ranks=(replace(RANK, measured_bytes=50 * GIB),)))
    assert 'class="plan" width="60.00%"' in over
    assert 'class="use" y="50%" width="100.00%"' in over


@pytest.mark.parametrize(("celsius", "tone"), [(85.0, ""), (86.0, "warn"), (94.0, "bad")])
def test_heat_is_marked_by_the_servers_own_limits(celsius: float, tone: str) -> None:
    rank = replace(RANK, chip=replace(CHIP, temperature_celsius=celsius))
    mark = f' class="{tone}"' if tone else ""
    assert f"<dt>Temperature</dt><dd{mark}>{celsius:g} °C</dd>" in html_of(
        replace(STATUS, ranks=(rank,))
    )


def test_what_is_unknown_is_a_dash_and_no_bar() -> None:
    text = words(html_of(replace(STATUS, ranks=(RankStatus(0, "placing"),), epoch=0, revision="")))
    for part in (
        "Temperature", "Health", "Utilisation", "Heartbeat", "Step", "Chip", "Process", "planned",
        "measured", "limit", "chip uses", "Revision", "Gang",
    ):  # fmt: skip
        assert f"{part} {DASH}" in text, part
    assert f"{DASH} generated tokens/s {DASH} prompt tokens/s" in text
    assert "<rect" not in html_of(replace(STATUS, ranks=(RankStatus(0, "placing"),)))
    sensors_only = replace(STATUS, ranks=(replace(RANK, chip=ChipReading(5, 1)),))
    assert f"Temperature {DASH} Health {DASH} Utilisation {DASH}" in words(html_of(sensors_only))


def test_a_coordinator_that_does_not_answer_leaves_all_open(
    client: TestClient, engine: Any
) -> None:
    async def gone() -> Any:
        raise NotServing("no coordinator yet")

    engine.status = engine.snapshots = gone
    page = client.get("/status", headers={"Accept": BROWSER})
    text = words(page.text)
    assert page.status_code == 200
    assert "starting" in text
    assert "no coordinator yet" in text
    assert not re.search(r"\d", text.partition("Requests")[2])
    assert client.get("/status").json()["reason"] == "no coordinator yet"


def test_loading_holds_and_failures() -> None:
    loading = replace(
        RANK, phase="loading", weights_planned_bytes=4 * GIB, weights_read_bytes=GIB, chip=None
    )
    failure = Failure(1, 0.0, "rank 1 died", 1, 55, "run", ("line one", "KeyError: 'x'"))
    heat = HeatStatus(
        "hold", "silence", "no temperature", True, (0,), {"heat": 12.4, "silence": 3.0},
        "npu-smi", 4.0, "npu-smi hangs", (), (CardReading(5, 71.6), CardReading(6)),
    )  # fmt: skip
    status = replace(STATUS, ranks=(loading,), last_failure=failure, heat=heat)
    text = words(html_of(status))
    for part in (
        "weights read 1.00 GiB of 4.00 GiB", "Order hold", "Why silence: no temperature",
        "Held by hand yes", "Held so far heat 12 s, silence 3 s", "Sensors npu-smi",
        "Read 4.0 s ago", "Sensor error npu-smi hangs", "Ranks without temperature 0",
        "Card 5 72 W", f"Card 6 {DASH}", "rank 1 died", "1970-01-01 00:00:00 UTC",
        "Phase run", "Step 55", "line one KeyError: 'x'",
    ):  # fmt: skip
        assert part in text


def test_nothing_that_comes_in_becomes_markup() -> None:
    evil = '<script>alert("x")</script>&\'"'
    chip = replace(CHIP, health=evil)
    failure = Failure(1, 0.0, evil, 0, 0, evil, (evil,))
    heat = HeatStatus("hold", evil, evil, sensor_source=evil, sensor_error=evil)
    status = replace(
        STATUS, reason=evil, model_id=evil, plan_id=evil, config_hash=evil, revision=evil,
        device=evil, last_failure=failure, heat=heat, ranks=(replace(RANK, phase=evil, chip=chip),),
    )  # fmt: skip
    html = html_of(status)
    assert html.count("<script") == 1
    assert "alert(" in html
    assert 'alert("' not in html


def test_the_page_runs_only_what_stands_in_it() -> None:
    response = StatusPage().response(STATUS, ())
    html, policy = bytes(response.body).decode(), response.headers["content-security-policy"]
    for kind in ("style", "script"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert not re.search(r"""(?:src|href)=["'](?!data:,)""", html)
    assert '<noscript><meta http-equiv="refresh"' in html


def snapshot(time_s: float, tokens: int, epoch: int = 1) -> RankSnapshot:
    return RankSnapshot(0, epoch, time_s, 9, prompt_tokens=10 * tokens, generation_tokens=tokens)


def test_rates_are_those_between_two_snapshots() -> None:
    rates = TokenRates()
    assert rates.observe(snapshot(100.0, 50), 0.0) == Rates()
    assert rates.observe(snapshot(100.0, 50), 1.0) == Rates(), "the same one again"
    assert rates.observe(snapshot(102.0, 80), 2.0) == Rates(150.0, 15.0)
    assert rates.observe(snapshot(102.0, 80), 3.0) == Rates(150.0, 15.0)
    assert rates.observe(snapshot(103.0, 80), 4.0) == Rates(0.0, 0.0), "nothing made is known"


def test_rates_that_say_nothing_of_now_are_unknown() -> None:
    rates = TokenRates()
    rates.observe(snapshot(100.0, 50), 0.0)
    rates.observe(snapshot(102.0, 80), 2.0)
    assert rates.observe(snapshot(102.0, 80), 12.1) == Rates(), "rank 0 is silent"
    assert rates.observe(snapshot(200.0, 90), 100.0) == Rates(), "nobody looked for long"
    assert rates.observe(None, 101.0) == Rates()
    assert rates.observe(snapshot(201.0, 95), 101.0) == Rates(50.0, 5.0)
    assert rates.observe(snapshot(202.0, 5, epoch=2), 102.0) == Rates(), "another gang"
