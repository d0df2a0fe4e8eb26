"""The job module: `python -m deploy.gpqa ...` is `nrank eval gpqa ...`, for `ray job submit`."""

from __future__ import annotations

import sys

from deploy import cli

if __name__ == "__main__":
    sys.exit(cli.main(["eval", "gpqa", *sys.argv[1:]]))
