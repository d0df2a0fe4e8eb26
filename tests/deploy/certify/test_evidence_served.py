"""What a server makes of an evidence file: the certified length, or why there is none."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster.client import EngineStatus
from cluster.coordinator import Coordinator
from cluster.local_gang import LocalLauncher
from cluster.tokens import Tokenizer
from deploy import cli, version
from deploy.certify.binding import NUM_PIECES, PIECE_BYTES, WHOLE_BYTES, checkpoint_hash
from deploy.config import load_config
from deploy.foreground import context_text
from deploy.serve import settings_of
from placement.errors import ConfigError
from placement.prepare import prepare
from tests.deploy.certify.scripted_gang import Script

END = 4089  # of the embedded model's chat turns
SERVED: dict[str, Any] = {"ranks": 2, "max_sequences": 2, "context_tokens": 1024}


@pytest.fixture
def evidence(embedded_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of what SERVED says, by a scripted gang."""
    tokenizer = Tokenizer.load(embedded_model_dir)
    script = Script(tokenizer.encode, tokenizer.decode, END)
    monkeypatch.setattr("deploy.certify.gangs.gang_starter", lambda *_: script.start)
    monkeypatch.setattr("deploy.certify.binding.code_revision", lambda: "fedcba987654")
    path = tmp_path / "evidence.json"
    flags = ["--ranks", "2", "--sequences", "2", "--context", "1024", "--lengths", "256,512"]
    assert cli.main(["certify", *flags, "--out", str(path)]) == 0
    return path


def status_of(evidence: Path, **changes: Any) -> tuple[EngineStatus, str]:
    """Status and metrics of a coordinator that has not started."""
    config = load_config(overrides={**SERVED, "evidence_file": str(evidence), **changes})
    engine = config.engine()
    coordinator = Coordinator(
        engine, prepare(engine).plan, lambda: LocalLauncher(engine), settings_of(config)
    )

    async def ask() -> tuple[EngineStatus, str]:
        return await coordinator.status(), (await coordinator.metrics_text()).decode()

    return asyncio.run(ask())


def test_the_certified_length_is_told_apart(evidence: Path) -> None:
    status, metrics = status_of(evidence, port=8123, model_name="other", step_timeout_s=9.0)
    assert (status.configured_tokens, status.certified_tokens) == (1024, 512)
    assert status.certified_warning == ""
    assert 'nrank_context_tokens{kind="certified"} 512.0' in metrics
    assert context_text(status).endswith("512 certified")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_sequences": 3}, "plan_id was"),
        ({"prefix_cache": False}, "plan_id was"),
        ({"decode_share": 0.25}, "engine_hash was"),
    ],
)
def test_a_changed_configuration_certifies_nothing(
    evidence: Path, changes: dict[str, Any], told: str
) -> None:
    status, metrics = status_of(evidence, **changes)
    assert status.certified_tokens == 0
    assert status.certified_warning.startswith("the evidence certified 512 tokens, but since then")
    assert told in status.certified_warning
    assert 'nrank_context_tokens{kind="certified"} 0.0' in metrics
    assert status.certified_warning in context_text(status)


def test_another_revision_certifies_nothing(
    evidence: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.certify.binding.code_revision", lambda: "0123456789ab")
    status, _ = status_of(evidence)
    assert status.certified_tokens == 0
    assert "is 0123456789ab: run nrank certify again" in status.certified_warning


def test_other_weights_of_the_same_shapes_certify_nothing(
    evidence: Path, embedded_model_dir: Path, tmp_path: Path
) -> None:
    copy = tmp_path / embedded_model_dir.name
    shutil.copytree(embedded_model_dir, copy)
    assert status_of(evidence, model=str(copy))[0].certified_tokens == 512
    weights = copy / "model-00001-of-00004.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    status, _ = status_of(evidence, model=str(copy))
    assert status.certified_tokens == 0
    assert "then checkpoint was" in status.certified_warning


def test_of_a_large_file_the_ends_and_places_between_count(tmp_path: Path) -> None:
    size = WHOLE_BYTES + 12345
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(size)
    hashes = {checkpoint_hash(str(tmp_path))}
    for number in range(NUM_PIECES):
        with path.open("r+b") as file:
            file.seek((size - PIECE_BYTES) * number // (NUM_PIECES - 1) + PIECE_BYTES - 1)
            file.write(b"x")
        hashes.add(checkpoint_hash(str(tmp_path)))
    (tmp_path / "notes.md").write_text("no part of the model")
    hashes.add(checkpoint_hash(str(tmp_path)))
    assert len(hashes) == 1 + NUM_PIECES


def test_a_file_that_is_no_evidence_ends_serve_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "evidence.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no evidence file"):
        settings_of(load_config(overrides={"evidence_file": str(path)}))
    assert cli.main(["serve", "--port", "0", "--evidence", str(path)]) == 2
    told = capsys.readouterr().err
    assert told == f"nrank: {path} is no evidence file of this version: no 'version'\n"


def test_changes_that_are_not_committed_are_another_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=n", "-c", "user.email=n@localhost"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    (tmp_path / "deploy").mkdir()
    module = tmp_path / "deploy" / "version.py"
    module.write_text("")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    monkeypatch.setattr(version, "__file__", str(module))
    found = [version.code_revision()]
    for text in ("a = 1", "a = 2"):
        module.write_text(text)
        found.append(version.code_revision())
    assert len(set(found)) == 3
    assert found[1].startswith(f"{found[0]}+")
    assert version.git_revision() == found[0]
