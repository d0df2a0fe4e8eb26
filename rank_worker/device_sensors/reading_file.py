"""The latest reading of a node as a file: replaced in one piece, read by all of the node.

Owns the file's form. A file of another version or half a file is none.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rank_worker.device_sensors.reading import CardReading, ChipReading, NodeReading

VERSION = 1


def publish(reading: NodeReading, path: Path) -> None:
    """Replace the file. OSError when the disk is full or the folder is gone: the old one stays."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_text(encode(reading))
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def read_published(path: Path) -> NodeReading | None:
    """Whatever stands there, however old; None where nothing does that can be read."""
    try:
        return decode(path.read_text())
    except (OSError, ValueError):
        return None


def encode(reading: NodeReading) -> str:
    return json.dumps({"version": VERSION, "reading": asdict(reading)})


def decode(text: str) -> NodeReading:
    """ValueError for text that encode() did not make."""
    try:
        found = json.loads(text)
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']} of a reading, known: {VERSION}")
        fields = found["reading"]
        chips = tuple(_chip(chip) for chip in fields.pop("chips"))
        cards = tuple(CardReading(**card) for card in fields.pop("cards"))
        return NodeReading(**fields, chips=chips, cards=cards)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a reading: {error}") from error


def _chip(fields: dict[str, Any]) -> ChipReading:
    codes, processes = fields.pop("error_codes"), fields.pop("processes")
    return ChipReading(
        **fields,
        error_codes=None if codes is None else tuple(codes),
        processes=None if processes is None else tuple((pid, held) for pid, held in processes),
    )
