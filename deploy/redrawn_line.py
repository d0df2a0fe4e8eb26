"""A line on a terminal that is drawn again and again, beside lines that stay.

A terminal that was closed ends no run: what can't be written is not seen, and that is all.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO

from deploy.load_display import DEFAULT_COLUMNS, is_terminal


class RedrawnLine:
    """`redraws` is false where `stream` is no terminal: there only lines that stay make sense."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.redraws = is_terminal(stream)
        self.is_drawn = False

    def draw(self, text: str) -> None:
        """In place of what was drawn, cut to the width of the terminal."""
        self.write(f"\r{text[: self._columns() - 1]}\x1b[K")
        self.is_drawn = True

    def clear(self) -> None:
        if self.is_drawn:
            self.write("\r\x1b[K")
            self.is_drawn = False

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)
            self._stream.flush()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or DEFAULT_COLUMNS
        except OSError:
            return DEFAULT_COLUMNS
