"""`python -m tests.serve.eval_screenshot` makes docs/images/evaluation.png: the evaluation's board,
drawn by dashboards/board_page.py, of a run that a real Prometheus watches while it lasts.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.serve.board_screenshot import fault_of, take
from tests.serve.front import ROOT, served
from tests.serve.prometheus_server import prometheus

IMAGE = ROOT / "docs/images/evaluation.png"
METRICS_PORT = 19465
QUESTIONS = 200
DONE = f"sum(nrank_eval_answers) >= {QUESTIONS * 3 // 4}"  # when the picture is taken
END_S = 600


def main() -> str | None:
    """What is wrong with the run or the image; None for a good one."""
    targets = {"nrank_eval": f"http://127.0.0.1:{METRICS_PORT}/metrics"}
    with (
        tempfile.TemporaryDirectory() as name,
        served({"ranks": 1, "context_tokens": 4096}) as base_url,
        prometheus(Path(name), targets) as watcher,
    ):
        folder, data = Path(name), Path(name) / "questions.csv"
        program = [sys.executable, "-m", "deploy.gpqa.make_questions", "--count", str(QUESTIONS)]
        subprocess.run([*program, "--out", str(data)], cwd=ROOT, check=True)
        command = [sys.executable, "-m", "deploy.cli", "eval", "gpqa", "--base-url", base_url]
        flags = ["--data", str(data), "--out", str(folder / "run"), "--concurrency", "4"]
        ports = ["--max-tokens", "256", "--metrics-port", str(METRICS_PORT)]
        with subprocess.Popen([*command, *flags, *ports], cwd=ROOT) as job:
            while not watcher.query(DONE):
                if job.poll() is not None:
                    return f"the run ended with code {job.returncode} before the picture was taken"
                time.sleep(0.2)
            take("evaluation", IMAGE, watcher, folder)
            code = job.wait(END_S)
    return f"the run ended with code {code}" if code else fault_of(IMAGE)


if __name__ == "__main__":
    sys.exit(main())
