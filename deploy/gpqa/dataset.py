"""Multiple-choice questions of a CSV file in GPQA's schema, read by column name.

Owns the file's shape. Its authors ask that no question is shown in plain text: no message here and
no repr holds a cell; rows are named by number, questions by id and SHA-256.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from placement.errors import ConfigError
from placement.headers import require_regular

QUESTION = "Question"
ANSWERS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
RECORD_ID, DOMAIN = "Record ID", "High-level domain"
REQUIRED = (QUESTION, *ANSWERS)
OPTIONAL = (RECORD_ID, DOMAIN)
MAX_CELL_CHARS = 1 << 20
_ID = re.compile(r"[\w.:-]{1,64}")  # is printed and stored: no text of a question fits in


@dataclass(frozen=True)
class Question:
    """One row. `options` has the correct answer first, texts stripped and otherwise unchanged."""

    id: str
    sha256: str  # of question and options
    domain: str  # "" where the file doesn't tell
    text: str = field(repr=False)
    options: tuple[str, str, str, str] = field(repr=False)


@dataclass(frozen=True)
class Dataset:
    """A file's questions in its order. `sha256` is that of the whole file."""

    sha256: str
    questions: tuple[Question, ...]


def read_dataset(path: str | Path) -> Dataset:
    """The questions of `path`. ConfigError names column or row, never what stands there."""
    try:
        require_regular(str(path))
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--data {path} can't be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--data {path} is not UTF-8 at byte {error.start}; save it as CSV in UTF-8"
        ) from None
    questions = tuple(_questions(path, _rows(path, text)))
    if not questions:
        raise ConfigError(f"--data {path} has no question; it needs a header and rows")
    _refuse_twins(path, questions)
    return Dataset(hashlib.sha256(data).hexdigest(), questions)


def _rows(path: str | Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Rows with their number; the header is row 1. Blank lines count and are left out."""
    before = csv.field_size_limit(MAX_CELL_CHARS)
    number = 0
    try:
        for number, row in enumerate(csv.reader(io.StringIO(text, newline=""), strict=True), 1):
            if row:
                yield number, row
    except csv.Error as error:
        raise ConfigError(f"--data {path} row {number + 1} is no CSV: {error}") from None
    finally:
        csv.field_size_limit(before)


def _questions(path: str | Path, rows: Iterator[tuple[int, list[str]]]) -> Iterator[Question]:
    _, header = next(rows, (0, []))
    columns = _columns(path, header)
    for number, row in rows:
        if len(row) != len(header):
            raise ConfigError(
                f"--data {path} row {number} has {len(row)} cells, the header {len(header)}; "
                f"is a quote missing?"
            )
        yield _question(path, number, {name: row[at].strip() for name, at in columns.items()})


def _columns(path: str | Path, header: Sequence[str]) -> dict[str, int]:
    """Name -> position, whatever the case and blanks of the header's names."""
    folded = [" ".join(name.split()).casefold() for name in header]
    found = {}
    for name in (*REQUIRED, *OPTIONAL):
        count = folded.count(name.casefold())
        if count > 1:
            raise ConfigError(f"--data {path} has {count} columns {name!r}; leave one")
        if count == 1:
            found[name] = folded.index(name.casefold())
        elif name in REQUIRED:
            raise ConfigError(
                f"--data {path} has no column {name!r} among {len(header)}; a GPQA file separates "
                f"cells by commas and has {', '.join(REQUIRED)}"
            )
    return found


def _question(path: str | Path, number: int, cells: dict[str, str]) -> Question:
    for name in REQUIRED:
        if not cells[name]:
            raise ConfigError(f"--data {path} row {number}: {name!r} is empty; fill or remove it")
    text, (correct, one, two, three) = cells[QUESTION], (cells[name] for name in ANSWERS)
    sha256 = hashlib.sha256("\x1f".join((text, correct, one, two, three)).encode()).hexdigest()
    record_id = cells.get(RECORD_ID) or f"sha-{sha256[:16]}"
    if not _ID.fullmatch(record_id):
        raise ConfigError(
            f"--data {path} row {number}: {RECORD_ID!r} must be 1 to 64 letters, digits or .:_-"
        )
    domain = cells.get(DOMAIN, "")
    if len(domain) > 64 or "\n" in domain:
        raise ConfigError(
            f"--data {path} row {number}: {DOMAIN!r} has {len(domain)} characters; one line of at "
            f"most 64 is a domain"
        )
    return Question(record_id, sha256, domain, text, (correct, one, two, three))


def _refuse_twins(path: str | Path, questions: Sequence[Question]) -> None:
    """Answers are kept by id: two questions of one id would be one."""
    seen: dict[str, int] = {}
    for at, question in enumerate(questions, 1):
        if question.id in seen:
            raise ConfigError(
                f"--data {path}: questions {seen[question.id]} and {at} have the same id "
                f"{question.id}; give each its own {RECORD_ID!r}"
            )
        seen[question.id] = at
