"""The process that loads libdcmi.so: a line in asks, a line out is a reading.

Ends with its parent. What the library itself prints goes nowhere.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from rank_worker.device_sensors.dcmi_library import DcmiLibrary
from rank_worker.device_sensors.dcmi_reader import NAME, DcmiReader
from rank_worker.device_sensors.reading_file import encode
from rank_worker.device_sensors.source import taken_now

PR_SET_PDEATHSIG = 1


def main() -> None:
    path, parent = sys.argv[1], int(sys.argv[2])
    # Where the driver hangs, the end of stdin is never read.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        reader = DcmiReader(DcmiLibrary(path))
    except OSError as error:
        told = f"can't load {path}: {error}; check the driver and LD_LIBRARY_PATH"
        print(encode(taken_now(NAME, error=told)), file=answers, flush=True)
        return
    for _ in sys.stdin:
        print(encode(reader.read()), file=answers, flush=True)


if __name__ == "__main__":
    main()
