"""How much time prefill may take from running answers. Rank 0's own figures; knows no tensors.

A step that also prefills is longer than one that only decodes. The surplus is owed: no prefill
goes on until steps without any have lasted as long as the share demands. So whatever the size of
a chunk, running streams keep at least `share` of the rate that they have alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WEIGHT = 0.2  # of a new time in an average


@dataclass
class Pacer:
    """`share`: part of its own rate that decoding keeps while prefill goes on; 0: no pacing."""

    share: float
    owed_s: float = 0.0
    _decode_s: dict[int, float] = field(default_factory=dict)  # by number of rows

    @property
    def allows_prefill(self) -> bool:
        return self.owed_s <= 0

    def note(self, decode_rows: int, prefill_tokens: int, seconds: float) -> None:
        """A step is over."""
        if not decode_rows:
            self.owed_s = 0.0
        elif not prefill_tokens:
            self.owed_s = max(0.0, self.owed_s - seconds)
            known = self._decode_s.get(decode_rows, seconds)
            self._decode_s[decode_rows] = known + WEIGHT * (seconds - known)
        elif self.share:
            surplus = max(0.0, seconds - self._decode_s.get(decode_rows, 0.0))
            self.owed_s += surplus * self.share / (1 - self.share)
