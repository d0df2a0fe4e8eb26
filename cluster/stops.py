"""Stop strings over a stream of text pieces.

Owns what is held back: exactly the longest tail that may still become a stop string. Knows
nothing of tokens or requests.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through up to the first stop string that completes; that one is never passed.

    "First" is by the position of the last character; of two that end together the longer wins.
    The result doesn't depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that may be sent now. Nothing once a stop string has matched."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        found = self._find(buffer)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return buffer[:start]
        keep = self._open_tail(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The held text, once, when the sequence ended without a match."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> tuple[int, str] | None:
        hits = [
            (at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0
        ]
        if not hits:
            return None
        _, start, stop = min(hits)
        return start, stop

    def _open_tail(self, buffer: str) -> int:
        """Length of the longest tail that is a proper prefix of some stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:size]):
                    longest = size
                    break
        return longest
