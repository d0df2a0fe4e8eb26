"""Digests of the tensors of a model directory: `nrank.manifest.json`, made once, checked any time.

A truncated file shows in its headers; a flipped bit shows only here. Reads every byte of the
tensors, in the order of the files. Knows no model and no device.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from placement.errors import CheckpointError
from placement.headers import CheckpointHeaders, TensorHeader, read_json
from placement.whole_file import write_whole

MANIFEST_FILE = "nrank.manifest.json"
ALGORITHM = "sha256"
VERSION = 1
READ_BYTES = 8 << 20
SHOWN_FAULTS = 5

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Digest:
    """Digest of the bytes of one tensor, without name, dtype or place."""

    file: str  # base name
    nbytes: int
    sha256: str


def write_manifest(headers: CheckpointHeaders, progress: Progress) -> str:
    """Hashes all tensors and writes the manifest beside them; returns its path.

    The file appears whole or not at all. Raises CheckpointError when something can't be read, or
    the directory not be written.
    """
    path = os.path.join(headers.model_dir, MANIFEST_FILE)
    tensors = {
        name: {"file": one.file, "bytes": one.nbytes, ALGORITHM: one.sha256}
        for name, one in _digests(headers, progress)
    }
    content = {"version": VERSION, "algorithm": ALGORITHM, "tensors": tensors}
    try:
        write_whole(path, json.dumps(content, indent=0, sort_keys=True))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be written ({error.strerror})") from error
    return path


def read_manifest(model_dir: str) -> dict[str, Digest]:
    """Digest of each tensor. CheckpointError when there is none or it can't be used."""
    path = os.path.join(model_dir, MANIFEST_FILE)
    if not os.path.exists(path):
        raise CheckpointError(f"{path}: no such file; make it with nrank inspect --write-manifest")
    content = read_json(path)
    if content.get("version") != VERSION or content.get("algorithm") != ALGORITHM:
        raise CheckpointError(
            f"{path}: version {content.get('version')!r}, algorithm {content.get('algorithm')!r}; "
            f"supported: {VERSION}, {ALGORITHM}"
        )
    tensors = content.get("tensors")
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{path}: has no tensors")
    return {name: _digest(path, name, entry) for name, entry in tensors.items()}


def _digest(path: str, name: str, entry: Any) -> Digest:
    fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    file, nbytes, value = (fields.get(key) for key in ("file", "bytes", ALGORITHM))
    if not isinstance(file, str) or type(nbytes) is not int or not isinstance(value, str):
        raise CheckpointError(f"{path}: {name}: an entry needs file, bytes and {ALGORITHM}")
    return Digest(file, nbytes, value)


def verify_manifest(headers: CheckpointHeaders, progress: Progress) -> int:
    """Hashes all tensors again and returns how many there are.

    CheckpointError naming file and tensor for each that differs, is missing or isn't listed.
    """
    wanted = read_manifest(headers.model_dir)
    path = os.path.join(headers.model_dir, MANIFEST_FILE)
    faults = [f"{name} is listed but not there" for name in wanted if name not in headers.tensors]
    faults += [f"{name} is not listed" for name in headers.tensors if name not in wanted]
    if faults:
        raise CheckpointError(f"{path}: {_sample(faults)}; write the manifest again if that is so")
    for name, found in _digests(headers, progress):
        if found.sha256 != wanted[name].sha256 or found.nbytes != wanted[name].nbytes:
            faults.append(f"{headers.tensors[name].file}: {name}")
    if faults:
        raise CheckpointError(
            f"{len(faults)} tensors differ from {path} ({_sample(faults)}); fetch these files again"
        )
    return len(wanted)


def _sample(faults: list[str]) -> str:
    more = f", and {len(faults) - SHOWN_FAULTS} more" if len(faults) > SHOWN_FAULTS else ""
    return ", ".join(faults[:SHOWN_FAULTS]) + more


def _digests(headers: CheckpointHeaders, progress: Progress) -> Iterator[tuple[str, Digest]]:
    """Name and digest of every tensor, by file and offset, so that a disk reads forward."""
    placed = sorted(headers.tensors.items(), key=lambda item: (item[1].file, item[1].offset))
    total = sum(header.nbytes for _, header in placed)
    done = 0
    for path, group in groupby(placed, key=lambda item: item[1].file):
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be opened ({error.strerror})") from error
        try:
            for name, header in group:
                value = _hash(handle, name, header)
                done += header.nbytes
                progress(done, total)
                yield name, Digest(os.path.basename(path), header.nbytes, value)
        finally:
            os.close(handle)


def _hash(handle: int, name: str, header: TensorHeader) -> str:
    digest = hashlib.sha256()
    at, end = header.offset, header.offset + header.nbytes
    while at < end:
        try:
            part = os.pread(handle, min(READ_BYTES, end - at), at)
        except OSError as error:
            raise CheckpointError(f"{header.file}: {name}: {error.strerror} at {at}") from error
        if not part:
            raise CheckpointError(f"{header.file}: {name} ends at byte {end}, file at {at}")
        digest.update(part)
        at += len(part)
    return digest.hexdigest()
