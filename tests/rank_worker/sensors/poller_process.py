"""A process that polls: FOLDER of the stand-in npu-smi, where the processes meet too.

Prints the latest reading's time, source and error for every line that it reads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rank_worker.device_sensors import poller
from rank_worker.device_sensors.smi import SmiSource
from rank_worker.device_sensors.smi_program import SmiProgram


def main() -> None:
    folder = Path(sys.argv[1])
    poller.INTERVAL_S = 0.02
    program = SmiProgram(folder / "npu-smi", folder, 20.0)
    sensors = poller.SensorPoller([SmiSource(program)], folder)
    for _ in sys.stdin:
        found = sensors.latest()
        told = None if found is None else (found.monotonic_s, found.source, found.error)
        print(json.dumps(told), flush=True)
    sensors.close()


if __name__ == "__main__":
    main()
