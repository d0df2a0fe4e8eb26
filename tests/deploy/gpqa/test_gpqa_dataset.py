"""The CSV of questions: columns by name, every bad file in one line that shows no cell."""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.gpqa import make_questions
from deploy.gpqa.dataset import Dataset, read_dataset
from deploy.gpqa.presets import LETTERS, PRESETS, make_prompts
from placement.errors import ConfigError
from tests.deploy.gpqa.conftest import COUNT

WriteCsv = Callable[[str], Path]
HEADER = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3"
SECRET = "SECRETCELL"


def test_columns_are_found_by_name(write_csv: WriteCsv) -> None:
    path = write_csv(
        "\ufeffincorrect answer 2,Extra Revised Question,QUESTION, Correct  Answer ,"
        "Incorrect Answer 1,Incorrect Answer 3,Record ID,High-level domain\r\n"
        'two,x,"  line one\nline ""two"", three ",right,one,three,rec1,Physics\r\n\r\n'
        "2,x,q,r,1,3,rec2,\r\n"
    )
    first, second = read_dataset(path).questions
    assert first.text == 'line one\nline "two", three'
    assert first.options == ("right", "one", "two", "three")
    assert (first.id, first.domain, second.domain) == ("rec1", "Physics", "")
    assert read_dataset(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_without_ids_the_hash_names_a_question(write_csv: WriteCsv) -> None:
    (question,) = read_dataset(write_csv(f"{HEADER}\n{SECRET},a,b,c,d\n")).questions
    assert question.id == f"sha-{question.sha256[:16]}"
    assert SECRET not in repr(question)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no column 'Question' among 0"),
        (HEADER, "has no question"),
        (f"{HEADER},Question\n", "has 2 columns 'Question'"),
        (HEADER.replace("Correct Answer", "Right", 1), "no column 'Correct Answer'"),
        (HEADER.replace(",", ";") + f"\n{SECRET};a;b;c;d\n", "no column 'Question' among 1"),
        (f"{HEADER}\nq,a,b,c,d\n{SECRET},a,b,c\n", "row 3 has 4 cells, the header 5"),
        (f"{HEADER}\n{SECRET},a,,c,d\n", "row 2: 'Incorrect Answer 1' is empty"),
        (f'{HEADER}\n"{SECRET},a,b,c,d\n', "row 2 is no CSV: unexpected end of data"),
        (f'{HEADER}\n"{SECRET}"x,a,b,c,d\n', "row 2 is no CSV"),
        (f"{HEADER},Record ID\n{SECRET},a,b,c,d,{SECRET} {SECRET}\n", "row 2: 'Record ID' must"),
        (f"{HEADER},High-level domain\nq,a,b,c,d,{SECRET * 9}\n", "row 2: 'High-level domain'"),
        (f"{HEADER}\n{SECRET},a,b,c,d\n{SECRET},a,b,c,d\n", "questions 1 and 2 have the same id"),
        (f"{HEADER}\n{'x' * (1 << 21)},a,b,c,d\n", "row 2 is no CSV: field larger than"),
    ],
)
def test_a_bad_file_is_told_by_row_or_column(write_csv: WriteCsv, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        read_dataset(write_csv(text))
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_dataset(tmp_path / "missing.csv")
    with pytest.raises(ConfigError, match="is no regular file"):
        read_dataset(tmp_path)
    (tmp_path / "utf16.csv").write_bytes(HEADER.encode("utf-16"))
    with pytest.raises(ConfigError, match="not UTF-8 at byte 0"):
        read_dataset(tmp_path / "utf16.csv")


@pytest.mark.parametrize("name", list(PRESETS))
def test_prompts_hold_each_option_under_its_letter(name: str, dataset: Dataset) -> None:
    for prompt in make_prompts(PRESETS[name], dataset.questions):
        right = prompt.question.options[0]
        assert re.search(rf"^\(?{prompt.key}\) {re.escape(right)}$", prompt.text, re.M)
        assert prompt.order[LETTERS.index(prompt.key)] == "A"
        assert sorted(prompt.order) == list(LETTERS)
        assert prompt.question.text in prompt.text
        assert prompt.question.text not in repr(prompt)


def test_the_cycle_of_options_is_that_of_aisbench(dataset: Dataset) -> None:
    prompts = make_prompts(PRESETS["aisbench"], dataset.questions * 10)[:198]
    assert "".join(prompt.key for prompt in prompts[:8]) == "DCBADCBA"
    keys = Counter(prompt.key for prompt in prompts)
    assert keys == {"D": 50, "C": 50, "B": 49, "A": 49}


@pytest.mark.parametrize(
    ("name", "orders"),
    [
        # random.Random(0): sample(range(4), 4) a row; shuffle of [1, 2, 3, 0] a row
        ("simple-evals", ["DBAC", "DBCA", "CDAB"]),
        ("lm-eval", ["DBCA", "BCAD", "BDCA"]),
    ],
)
def test_shuffles_are_even_and_the_same_every_time(
    name: str, orders: list[str], dataset: Dataset
) -> None:
    prompts = make_prompts(PRESETS[name], dataset.questions * 50)
    assert prompts[:7] == make_prompts(PRESETS[name], dataset.questions[:7])
    assert [prompt.order for prompt in prompts[:3]] == orders
    counts = Counter(prompt.key for prompt in prompts)
    assert all(200 <= counts[letter] <= 300 for letter in LETTERS)


def test_presets_have_different_hashes() -> None:
    assert len({preset.sha256 for preset in PRESETS.values()}) == len(PRESETS)


def test_made_questions_have_one_right_answer(dataset: Dataset) -> None:
    assert len(dataset.questions) == COUNT
    for question in dataset.questions:
        assert len(set(question.options)) == 4
    assert {question.domain for question in dataset.questions} == {"Numbers", "Words", "Reading"}


BEST: dict[str, tuple[Callable[..., str], Callable[[str], object]]] = {
    "largest": (max, int),
    "smallest": (min, int),
    "first_in_order": (min, str),
    "longest": (max, len),
}


def test_made_questions_are_right() -> None:
    for text, correct, *wrong, _, _, kind in make_questions.make_rows(700, seed=5):
        options = [correct, *wrong]
        if kind == "total":
            one, two = map(int, re.findall(r"\d+", text))
            assert int(correct) == one + two
        elif kind == "even":
            assert [option for option in options if int(option) % 2 == 0] == [correct]
        elif kind == "owner":
            colour = text.rpartition("Who has the ")[2].partition(" ")[0]
            assert f"{correct} has a {colour} bag." in text
        else:
            best, key = BEST[kind]
            assert best(options, key=key) == correct
            assert [key(option) for option in options].count(key(correct)) == 1


def test_a_seed_makes_the_same_file(tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        arguments = ["--count", "200", "--seed", seed, "--out", str(tmp_path / name)]
        assert make_questions.main(arguments) == 0
        files.append((tmp_path / name).read_text())
    assert files[0] == files[1] != files[2]
    assert len(list(csv.reader(files[0].splitlines()))) == 201


def test_a_file_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        make_questions.main(["--out", str(tmp_path / "no" / "q.csv")])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "there is no folder" in err
    assert err.count("\n") == 1
