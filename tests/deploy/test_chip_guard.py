"""Heat without Ray: a real `npu-smi` process, a real gang, and a word that its ranks share."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from deploy import chip_guard
from deploy.chip_guard import guard_of, guarded
from placement.config import EngineConfig
from placement.errors import ConfigError
from rank_worker.device_sensors.poller import SensorPoller
from rank_worker.device_sensors.smi import SmiSource
from rank_worker.device_sensors.smi_program import SmiProgram
from rank_worker.guard_word import Order
from rank_worker.launch import Engine, launch_engine
from rank_worker.messages import EngineRequest
from tests.serve.scripted_sensor import ScriptedSensor

PATIENCE_S = 60.0


def wait_order(engine: Engine, order: Order) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while engine.word.order is not order:
        assert time.monotonic() < deadline_s, f"{order.name} did not come"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_hot_chip_brings_the_gang_to_rest_and_the_answer_stays_the_same(
    embedded_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(chip_guard, "INTERVAL_S", 0.05)
    sensor = ScriptedSensor(tmp_path, 4)
    program = SmiProgram(tmp_path / "npu-smi", tmp_path)
    config = EngineConfig(str(embedded_model_dir), ranks=2, context_tokens=1024)
    request = EngineRequest("a", (7, 8, 9), 300, ignore_eos=True)

    def watched(engine: Engine) -> None:
        wait_order(engine, Order.HOLD)
        sensor.heat(1, 84)

    with launch_engine(
        config, guard=lambda e: guarded(e, lambda: SensorPoller([SmiSource(program)], tmp_path))
    ) as engine:
        (unheld,) = engine.generate([request])
        sensor.heat(1, 95)
        helper = threading.Thread(target=watched, args=(engine,))
        helper.start()
        wait_order(engine, Order.HOLD)
        (held,) = engine.generate([request])
        helper.join()
        assert engine.word.order is Order.RUN
    assert held.token_ids == unheld.token_ids
    said = capsys.readouterr().err
    assert "at rest: chip 2.1 (rank 1) reached 95 °C, hold_celsius=94" in said
    assert not [thread for thread in threading.enumerate() if thread.name == "chip-guard"]


def test_a_device_that_is_not_here_is_refused_before_sensors_are_asked() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")

    def asked() -> SensorPoller:
        raise AssertionError("sensors were asked")

    engine = Engine(EngineConfig("m", device="cuda"))
    with pytest.raises(ConfigError, match="torch finds no GPU here"), guarded(engine, asked):
        pass


def test_a_cpu_has_no_guard() -> None:
    assert guard_of(EngineConfig("m", device="npu")) is guarded
    assert guard_of(EngineConfig("m")) is not guarded
