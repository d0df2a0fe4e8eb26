"""What the stand-in libraries counted and logged, for the programs beside this file."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Counts:
    """In the order of the enumeration in standin.c."""

    malloc_calls: int = 0
    malloc_bytes: int = 0
    host_malloc_calls: int = 0
    h2d_calls: int = 0
    h2d_bytes: int = 0
    d2h_calls: int = 0
    d2h_bytes: int = 0
    stream_syncs: int = 0
    event_syncs: int = 0
    device_syncs: int = 0
    launches: int = 0
    replays: int = 0
    captures: int = 0
    collectives: int = 0
    refused_tensors: int = 0

    def since(self, before: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


class Standin:
    """The library that torch_npu was linked with in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libascendcl.so")
        self._library.standin_trace.restype = ctypes.c_char_p
        assert self._library.standin_num_counts() == len(fields(Counts))

    def counts(self) -> Counts:
        values = (ctypes.c_uint64 * len(fields(Counts)))()
        self._library.standin_counts(values)
        return Counts(*values)

    def clear_trace(self) -> None:
        self._library.standin_trace_clear()

    def trace(self) -> list[str]:
        """Launches, copies to the host and waits since the last clear, in order."""
        text: bytes = self._library.standin_trace()
        return text.decode().splitlines()
