"""What Serve imports: `deploy.serve:app` and `deploy.serve:build`, without a cluster."""

from __future__ import annotations

import pytest

from placement.errors import ConfigError

pytestmark = pytest.mark.ray


@pytest.fixture
def serve_module():
    import deploy.serve

    return deploy.serve


def test_app_serves_the_embedded_model_or_the_file_that_is_named(
    serve_module, monkeypatch, tmp_path
):
    from ray.serve import Application

    monkeypatch.delenv("NRANK_CONFIG", raising=False)
    assert isinstance(serve_module.app, Application)
    monkeypatch.setenv("NRANK_CONFIG", str(tmp_path / "missing.yaml"))
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        _ = serve_module.app


def test_build_takes_the_keys_of_a_config_file(serve_module):
    from ray.serve import Application

    assert isinstance(serve_module.build({"ranks": "3", "max_queue_requests": "1"}), Application)
    with pytest.raises(ConfigError, match="rank_count"):
        serve_module.build({"rank_count": 3})


def test_an_unknown_attribute_is_an_attribute_error(serve_module):
    with pytest.raises(AttributeError, match="application_"):
        _ = serve_module.application_


@pytest.mark.parametrize(
    ("device", "name", "resource"),
    [("cpu", "", "nrank_chip"), ("cuda", "", "GPU"), ("npu", "", "NPU"), ("cpu", "NPU", "NPU")],
)
def test_the_resource_of_a_rank_follows_the_device(serve_module, device, name, resource):
    from deploy.config import ServeConfig

    config = ServeConfig(device=device, resource_name=name)
    assert serve_module.resource_of(config) == resource


def test_fewer_chips_than_ranks_are_refused_before_anything_starts(serve_module):
    from deploy.config import load_config

    config = load_config(overrides={"ranks": 3, "chips": 2, "port": 0})
    with pytest.raises(ConfigError, match=r"3.*2"):
        serve_module.serve_foreground(config)


def test_a_plan_that_does_not_fit_is_refused_before_anything_starts(serve_module):
    from deploy.config import load_config
    from placement.errors import PlanError

    config = load_config(overrides={"usable_bytes": 1 << 20, "port": 0})
    with pytest.raises(PlanError):
        serve_module.serve_foreground(config)


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", None), ("tokenizer.json", "{"), ("chat_template.jinja", "{% for x in %}")],
)
def test_a_broken_tokenizer_or_template_is_refused_before_anything_starts(
    serve_module, tmp_path, embedded_model_dir, name, content
):
    import ray

    from deploy.config import load_config
    from placement.errors import CheckpointError

    for path in embedded_model_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    config = load_config(overrides={"model": str(tmp_path), "port": 0})
    before = ray.is_initialized()
    with pytest.raises(CheckpointError, match=name):
        serve_module.serve_foreground(config)
    assert ray.is_initialized() is before
