"""Digests of a model directory: written once, found equal, and each kind of damage named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from placement.errors import CheckpointError
from placement.headers import CheckpointHeaders, read_headers
from placement.manifest import MANIFEST_FILE, read_manifest, verify_manifest, write_manifest


def silent(done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.fixture
def written(tiny_copy: Path) -> CheckpointHeaders:
    headers = read_headers(str(tiny_copy))
    write_manifest(headers, silent)
    return headers


def refusal(headers: CheckpointHeaders) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify_manifest(headers, silent)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_tensor_has_the_digest_of_its_bytes(written: CheckpointHeaders) -> None:
    digests = read_manifest(written.model_dir)
    assert digests.keys() == written.tensors.keys()
    for name in ("lm_head.weight", "mtp.fc_hidden.weight", "model.layers.0.linear_attn.A_log"):
        header = written.tensors[name]
        data = Path(header.file).read_bytes()[header.offset : header.offset + header.nbytes]
        assert digests[name].sha256 == hashlib.sha256(data).hexdigest()
        assert digests[name].nbytes == header.nbytes
    assert verify_manifest(written, silent) == len(written.tensors)


def test_progress_ends_at_all_bytes(written: CheckpointHeaders) -> None:
    seen: list[tuple[int, int]] = []
    verify_manifest(written, lambda done, total: seen.append((done, total)))
    total = sum(header.nbytes for header in written.tensors.values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_one_flipped_bit_names_file_and_tensor(written: CheckpointHeaders) -> None:
    header = written.tensors["model.layers.2.mlp.gate.weight"]
    path = Path(header.file)
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[header.offset + 17] ^= 1
    path.write_bytes(data)
    message = refusal(written)
    assert f"{path}: model.layers.2.mlp.gate.weight" in message
    assert message.startswith("1 tensors differ")


def test_tensors_that_the_manifest_lacks_or_has_alone(written: CheckpointHeaders) -> None:
    path = Path(written.model_dir) / MANIFEST_FILE
    content = json.loads(path.read_text())
    content["tensors"]["ghost"] = content["tensors"].pop("lm_head.weight")
    path.write_text(json.dumps(content))
    message = refusal(written)
    assert "ghost is listed but not there" in message
    assert "lm_head.weight is not listed" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "bad JSON"),
        ('{"version": 2, "algorithm": "sha256", "tensors": {}}', "version 2"),
        ('{"version": 1, "algorithm": "md5", "tensors": {}}', "'md5'"),
        ('{"version": 1, "algorithm": "sha256"}', "has no tensors"),
        ('{"version": 1, "algorithm": "sha256", "tensors": {"a": {}}}', "a: an entry needs file"),
    ],
)
def test_manifest_that_cannot_be_used(written: CheckpointHeaders, text: str, words: str) -> None:
    (Path(written.model_dir) / MANIFEST_FILE).write_text(text)
    message = refusal(written)
    assert words in message
    assert MANIFEST_FILE in message


def test_without_a_manifest_the_remedy_is_told(tiny_copy: Path) -> None:
    assert "--write-manifest" in refusal(read_headers(str(tiny_copy)))


def test_a_file_that_became_shorter_is_named(written: CheckpointHeaders) -> None:
    header = max(written.tensors.values(), key=lambda one: (one.file, one.offset))
    path = Path(header.file)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    message = refusal(written)
    assert str(path) in message
    assert "ends at byte" in message


def test_a_directory_that_cannot_be_written(tiny: tuple[object, CheckpointHeaders]) -> None:
    from dataclasses import replace

    headers = replace(tiny[1], model_dir="/proc/no-such-place")
    with pytest.raises(CheckpointError, match=r"/proc/no-such-place/.*can't be written"):
        write_manifest(headers, silent)
