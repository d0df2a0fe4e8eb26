"""The archive of a report: all of it went through the redactor, and it is whole or absent."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.redaction import Redactor
from placement.errors import ConfigError
from placement.whole_file import OWNER_ONLY, write_whole

FOLDER = "nrank-report"


def write_archive(path: Path, files: Mapping[str, Any], redactor: Redactor) -> None:
    """Writes a .tar.gz that only its owner may read. ConfigError where it can't be written.

    Strings go in as text, anything else as JSON. An old file is replaced once the new one is whole.
    """
    now_s = int(time.time())
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in files.items():
            _add(archive, redactor.text(name), _bytes(content, redactor), now_s)
    try:
        write_whole(path, packed.getvalue(), OWNER_ONLY)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"the report can't be written to {path}: {reason}; choose another place with --out"
        ) from error


def _bytes(content: Any, redactor: Redactor) -> bytes:
    if isinstance(content, str):
        return redactor.text(content).encode()
    return (json.dumps(redactor.json(content), indent=1) + "\n").encode()


def _add(archive: tarfile.TarFile, name: str, data: bytes, now_s: int) -> None:
    info = tarfile.TarInfo(f"{FOLDER}/{name}")
    info.size, info.mtime, info.mode = len(data), now_s, 0o600
    archive.addfile(info, io.BytesIO(data))
