"""Questions made by the generator, a server that answers them, and the command in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.gpqa import asker, make_questions
from deploy.gpqa.dataset import Dataset, read_dataset
from deploy.gpqa.ledger import Contents, read_ledger
from tests.deploy.gpqa.scripted_server import ScriptedServer

COUNT = 20


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "questions.csv"
    arguments = ["--count", str(COUNT), "--seed", "3", "--out", str(path)]
    assert make_questions.main(arguments) == 0
    return path


@pytest.fixture
def dataset(data: Path) -> Dataset:
    return read_dataset(data)


@pytest.fixture
def server(dataset: Dataset) -> Iterator[ScriptedServer]:
    one = ScriptedServer(dataset.questions)
    yield one
    one.close()


class Run:
    """`nrank eval gpqa` with its folder; called again it resumes."""

    def __init__(self, server: ScriptedServer, data: Path, folder: Path, capsys: Any) -> None:
        self.server, self.data, self.folder = server, data, folder
        self.out = self.err = ""
        self._capsys = capsys

    def arguments(self, *more: object) -> list[str]:
        given = ("--base-url", self.server.base_url, "--data", self.data, "--out", self.folder)
        return [str(one) for one in (*given, "--metrics-port", 0, *more)]

    def __call__(self, *more: object) -> int:
        return self.command("gpqa", *self.arguments(*more))

    def command(self, *arguments: object) -> int:
        try:
            code = cli.main(["eval", *map(str, arguments)])
        except SystemExit as end:
            code = int(end.code or 0)
        self.out, self.err = self._capsys.readouterr()
        return code

    @property
    def ledger(self) -> Contents:
        return read_ledger(self.folder)


@pytest.fixture
def run(
    server: ScriptedServer,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Pauses that no server asked for are short."""
    monkeypatch.setattr(asker, "FIRST_PAUSE_S", 0.001)
    return Run(server, data, tmp_path / "run", capsys)


@pytest.fixture
def write_csv(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "given.csv"
        path.write_bytes(text.encode())
        return path

    return write
