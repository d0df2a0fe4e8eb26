"""Files that others read: they see one before or after it was written, never half of it."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replaces `path`. OSError when it can't."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)
