"""What evidence is bound to besides the plan: the engine's configuration, the files, the revision.

For those who write evidence and for the server that reads it. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from deploy.version import code_revision
from placement.config import EngineConfig
from placement.errors import CheckpointError
from placement.evidence import Binding

# Say where and for how long, not what is computed; what an ownership file holds is in the plan id.
NO_PART = (
    "model_dir", "master_address", "ownership_file", "load_timeout_s", "start_timeout_s",
    "step_timeout_s", "pin_cpus",
)  # fmt: skip
SUFFIXES = (".json", ".jinja", ".safetensors")
WHOLE_BYTES = 32 << 20  # files up to this size are read whole, of larger ones some pieces
NUM_PIECES = 5
PIECE_BYTES = 16 << 10


def binding_of(config: EngineConfig, plan_id: str = "") -> Binding:
    """CheckpointError when a file of the model directory can't be read."""
    checkpoint = checkpoint_hash(config.model_dir)
    return Binding(plan_id, engine_hash(config), checkpoint, code_revision())


def engine_hash(config: EngineConfig) -> str:
    """Of all that decides what ranks compute and how they share their time."""
    values = {key: value for key, value in asdict(config).items() if key not in NO_PART}
    return _short(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def checkpoint_hash(model_dir: str) -> str:
    """Of names, sizes and bytes of the files that make the model, wherever the directory lies.

    Of files above WHOLE_BYTES the first and last piece and those between count: a checkpoint of
    hundreds of GiB is told from another in seconds.
    """
    paths = sorted(p for p in Path(model_dir).iterdir() if p.suffix in SUFFIXES)
    digest = hashlib.sha256()
    for path in paths:
        try:
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                for piece in _pieces(file, size):
                    digest.update(piece)
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    return digest.hexdigest()[:16]


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    if size <= WHOLE_BYTES:
        yield file.read()
        return
    for number in range(NUM_PIECES):
        file.seek((size - PIECE_BYTES) * number // (NUM_PIECES - 1))
        yield file.read(PIECE_BYTES)


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
