"""What can be told without torch is refused before it is loaded, which takes seconds."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

REFUSE = """
import sys
from deploy import cli
for arguments in eval(sys.argv[1]):
    assert cli.main(arguments) == 2, arguments
loaded = {"torch", "transformers"} & set(sys.modules)
sys.exit(str(sorted(loaded)) if loaded else 0)
"""


def test_bad_input_of_long_commands_is_refused_without_torch(tmp_path: Path) -> None:
    held, foreign = tmp_path / "held.json", tmp_path / "foreign.json"
    foreign.write_text("{}")
    cases = [
        (["certify", "--lengths", "5"], "a length of 5 tokens has no room"),
        (["certify", "--lengths", "9999999"], "--lengths 9999999 is above the context"),
        (["certify", "--config", "/none.yml"], "can't read config file /none.yml"),
        (["certify", "--out", str(held)], "held.json is written by another process"),
        (["certify", "--out", str(foreign)], "foreign.json is no evidence file"),
        (["check-quality", "--baseline", "/none.json"], "can't read /none.json"),
        (["check-quality", "--baseline", str(foreign)], "foreign.json is no baseline"),
        (["check-quality", "--write-baseline", str(tmp_path)], "is a folder; give a file"),
        (["check-quality", "--write-baseline", "/none/b.json"], "there is no folder /none"),
    ]
    arguments = repr([case for case, _ in cases])
    with (tmp_path / ".held.json.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [sys.executable, "-c", REFUSE, arguments], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.rstrip("\n").split("\n")
    assert len(lines) == len(cases)
    for line, (_, told) in zip(lines, cases, strict=True):
        assert told in line
    assert sorted(one.name for one in tmp_path.iterdir()) == [".held.json.lock", "foreign.json"]
