"""All tests but the slow ones, in two halves beside each other: `python -m tests.halves`.

One half mostly waits for servers, the other computes. Arguments go to both. Prints the second's
output after the first's; exits with the first code that is not 0.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

TESTS = Path(__file__).parent
# The servers last: what they put into the environment stays until the end.
WAITING = ("structure", "golden", "dashboards", "deploy", "cluster", "serve")
NOTHING_SELECTED = 5


def main(arguments: list[str]) -> int:
    waiting = [str(TESTS / name) for name in WAITING]
    pytest = [sys.executable, "-m", "pytest", "-m", "not slow", *arguments]
    with tempfile.TemporaryFile() as output:
        computing = subprocess.Popen(
            [*pytest, *(f"--ignore={path}" for path in waiting)],
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        serving = subprocess.Popen([*pytest, *waiting])

        def end(_: int, __: FrameType | None) -> None:
            """Both end as pytest does when it is interrupted: what they started ends, too."""
            for half in (computing, serving):
                half.send_signal(signal.SIGINT)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all three
        codes = [serving.wait(), computing.wait()]
        output.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(output.read())
    if NOTHING_SELECTED in codes and codes != [NOTHING_SELECTED] * 2:
        codes.remove(NOTHING_SELECTED)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
