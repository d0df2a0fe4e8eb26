"""The server's configuration: precedence, bounds, and errors that name the key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from deploy.config import ServeConfig, load_config
from placement.config import EngineConfig
from placement.errors import ConfigError


def write(folder: Path, text: str) -> str:
    path = folder / "serve.yaml"
    path.write_text(text)
    return str(path)


def test_without_anything_the_embedded_model_runs_on_two_ranks(embedded_model_dir: Path) -> None:
    config = load_config()
    assert Path(config.model) == embedded_model_dir
    assert config.model_name == "tiny-flash-next"
    assert (config.ranks, config.dtype, config.host, config.port) == (
        2,
        "float32",
        "127.0.0.1",
        8000,
    )


def test_a_given_model_runs_on_one_rank_and_given_ranks_stay(tmp_path: Path) -> None:
    assert load_config(overrides={"model": str(tmp_path)}).ranks == 1
    assert load_config(overrides={"ranks": 1}).ranks == 1
    assert load_config(write(tmp_path, "ranks: 1")).ranks == 1


def test_reuse_is_on_and_drafts_are_two_where_there_is_a_draft_head(
    embedded_model_dir: Path, random_checkpoint: Callable[..., Path]
) -> None:
    """Drafts are the model's matter until they are asked for; none is an answer, too."""
    config = load_config()
    assert config.prefix_cache
    assert config.engine().prefix_cache
    assert (config.mtp, config.engine().mtp) == (2, 2)
    headless = str(random_checkpoint(layers=4, mtp=False))
    assert load_config(overrides={"model": headless}).mtp == 0
    for asked in (0, 4):
        assert load_config(overrides={"mtp": asked}).engine().mtp == asked
    assert not load_config(overrides={"prefix_cache": False}).engine().prefix_cache


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "ranks: 4\nport: 9000\ncontext_tokens: 1024\n")
    config = load_config(path, {"port": 9001})
    assert (config.ranks, config.port) == (4, 9001)
    assert config.engine().context_tokens == 1024


def test_the_engine_gets_every_field_it_has() -> None:
    config = load_config()
    engine = config.engine()
    shared = {field.name for field in fields(EngineConfig)} - {"model_dir"}
    assert shared <= set(ServeConfig.model_fields)
    assert engine.model_dir == config.model
    assert all(getattr(engine, name) == getattr(config, name) for name in shared)


def test_defaults_of_both_configurations_agree() -> None:
    engine, served = EngineConfig(model_dir=""), ServeConfig.model_fields
    differing = {
        field.name
        for field in fields(EngineConfig)
        if field.name in served and served[field.name].default != getattr(engine, field.name)
    }
    # Chosen by device and model, or a choice.
    assert differing == {"dtype", "mtp", "pin_cpus", "prefix_cache"}


@pytest.mark.parametrize(
    ("device", "told", "pinned"),
    [("cpu", None, False), ("npu", None, True), ("cuda", None, True), ("npu", False, False)],
)
def test_ranks_are_pinned_on_every_device_but_the_cpu(
    device: str, told: bool | None, pinned: bool
) -> None:
    config = load_config(None, {"device": device, "dtype": "float32", "pin_cpus": told})
    assert config.engine().pin_cpus is pinned


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank: 2", "unknown key 'rank'; did you mean 'ranks'?"),
        ("contexttokens: 2", "did you mean 'context_tokens'?"),
        ("zzzz: 2", "known keys: model, model_name, ranks"),
        ("ranks: 0", "ranks = 0: Input should be greater than or equal to 1"),
        ("ranks: many", "ranks = 'many'"),
        ("port: 65536", "port = 65536"),
        ("device: tpu", "device = 'tpu': Input should be 'cpu', 'cuda' or 'npu'"),
        ("step_timeout_s: 0", "step_timeout_s = 0"),
        ("mtp: 5", "mtp = 5"),
        ("prefix_bytes: -2", "prefix_bytes = -2"),
        ("decode_share: 1", "decode_share = 1"),
        ("ranks: [", "is not valid YAML"),
        ("- ranks", "must hold `key: value` lines, found a list"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    message = str(caught.value)
    assert expected in message
    assert "serve.yaml" in message
    assert "\n" not in message


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n")) == load_config()


def test_the_hash_follows_the_resolved_values(tmp_path: Path) -> None:
    base = load_config()
    assert base.config_hash == load_config(overrides={"ranks": 2}).config_hash
    assert base.config_hash != load_config(overrides={"ranks": 3}).config_hash


def test_each_device_has_its_own_dtype(embedded_model_dir: Path, tmp_path: Path) -> None:
    for device, dtype in (("cpu", "float32"), ("npu", "float16"), ("cuda", "bfloat16")):
        assert load_config(overrides={"device": device}).dtype == dtype
    (tmp_path / "config.json").write_text('{"text_config": {"dtype": "float16"}}')
    nested = load_config(overrides={"device": "cuda", "model": str(tmp_path)})
    assert nested.dtype == "float16"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no dtype"):
        load_config(overrides={"device": "cuda", "model": str(tmp_path)})


@pytest.mark.parametrize(
    ("word", "value"), [("on", "on"), ("off", "off"), ('"on"', "on"), ("auto", "auto")]
)
def test_bare_yaml_words_switch_sensors(tmp_path: Path, word: str, value: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"sensors: {word}\n")
    assert load_config(str(path)).sensors == value


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        ("hold_celsius: 97\n", "hold_celsius=97, and that below cut_celsius=96"),
        ("resume_celsius: 94\n", "resume_celsius=94 must lie below hold_celsius=94"),
        ("cut_celsius: .inf\n", "cut_celsius"),
        ("cut_celsius: 9600\n", "cut_celsius"),
        ("sensors: maybe\n", "sensors"),
    ],
)
def test_limits_of_heat_are_refused_in_one_line(tmp_path: Path, lines: str, part: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(lines)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
