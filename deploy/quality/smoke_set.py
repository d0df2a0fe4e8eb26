"""The fixed smoke set: what `nrank check-quality` asks, as token ids of a model's own tokenizer.

Five parts: texts to go on with, tool calls, choice questions, codes in long texts, and texts whose
every token is scored. Questions and needles are those of the evaluation and of the certification.
Whoever changes a word here makes another set: its hash is in every baseline.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deploy.certify.needles import make_prompts as make_needles
from deploy.gpqa.dataset import Question
from deploy.gpqa.make_questions import make_rows
from deploy.gpqa.presets import PRESETS
from deploy.gpqa.presets import make_prompts as make_choices
from placement.errors import ConfigError
from placement.evidence import Asked

TEXT_TOKENS, TOOL_TOKENS, CHOICE_TOKENS, NEEDLE_TOKENS = 48, 64, 96, 48
NUM_CHOICES, CHOICE_SEED = 20, 4  # of ten seeds the one that leaves the embedded model most to lose
NEEDLE_LENGTHS, NEEDLE_DEPTHS = (256, 512, 1024), (0, 50, 100)
LEAST_CONTEXT = 512  # for the questions and the shortest needles

TEXTS = (
    "A cache keeps results of earlier work so that they need not be computed again. When it is",
    "Anna had a red bag and Boris had a green one. When they met at the station,",
    "1, 2, 3, 5, 8, 13,",
    "def count(boats):\n    return len([",
)
CHATS = ("Count from 11 to 24.", "Sort these words: piano cloud river apple")
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    },
)
TOOL_SYSTEM = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
    "provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>"
    "\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{{"name": <function-name>, "arguments": '
    "<args-json-object>}}\n</tool_call>"
)
TOOL_QUESTIONS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
    ("How is the weather in Berlin today?", "get_weather", {"city": "Berlin"}),
    ("Please add 17 and 25.", "add", {"a": 17, "b": 25}),
    ("Use the tool to compute 8 + 61.", "add", {"a": 8, "b": 61}),
)
SCORED = (
    "The lighthouse stood at the end of a narrow road. Every evening at six, Anna counted the "
    "boats and wrote the number on a page. When the fog came in she lit the lamp and waited.",
    "To read a file line by line, open it and iterate over the object. Each line ends with a line "
    "break, which most programs strip. If the file is missing, an error with its name is raised.",
)


class ChatTokenizer(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]: ...
    def encode_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Asking:
    """A prompt, how long its answer may be, and what a right one has: "" where none is right."""

    name: str
    ids: tuple[int, ...]
    max_tokens: int
    expected: str = ""


@dataclass(frozen=True)
class SmokeSet:
    """`tools` is empty where the model has no chat template; so are `choices` and `needles`."""

    texts: tuple[Asking, ...]
    tools: tuple[Asking, ...]
    choices: tuple[Asking, ...]
    needles: tuple[Asking, ...]
    scored: tuple[Asking, ...]

    @property
    def all(self) -> tuple[Asking, ...]:
        return (*self.texts, *self.tools, *self.choices, *self.needles, *self.scored)

    @property
    def counts(self) -> tuple[int, ...]:
        """Answers of each part, and positions scored: every token but the first of a text."""
        parts = (self.texts, self.tools, self.choices, self.needles)
        return (*map(len, parts), sum(len(asking.ids) - 1 for asking in self.scored))

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for asking in self.all:
            told = f"{asking.name}\0{asking.max_tokens}\0{asking.expected}\0"
            digest.update(told.encode() + array("q", asking.ids).tobytes())
        return digest.hexdigest()[:16]


def make_smoke_set(tokenizer: ChatTokenizer, has_template: bool, context_tokens: int) -> SmokeSet:
    """ConfigError for a context that is too short."""
    if context_tokens < LEAST_CONTEXT:
        raise ConfigError(
            f"the context of {context_tokens} tokens is too short for the smoke set, which needs "
            f"{LEAST_CONTEXT}; raise --context"
        )
    texts = [Asking(f"text {n}", tokenizer.encode(t), TEXT_TOKENS) for n, t in enumerate(TEXTS, 1)]
    scored = [Asking(f"scored {n}", tokenizer.encode(t), 1) for n, t in enumerate(SCORED, 1)]
    if not has_template:
        return SmokeSet(tuple(texts), (), (), (), tuple(scored))
    texts += [
        Asking(f"chat {number}", _chat(tokenizer, text), TEXT_TOKENS)
        for number, text in enumerate(CHATS, 1)
    ]
    return SmokeSet(
        tuple(texts),
        tuple(_tools(tokenizer)),
        tuple(_choices(tokenizer)),
        tuple(_needles(tokenizer, context_tokens)),
        tuple(scored),
    )


def _chat(tokenizer: ChatTokenizer, text: str, system: str = "") -> tuple[int, ...]:
    first = [{"role": "system", "content": system}] if system else []
    return tokenizer.encode_chat([*first, {"role": "user", "content": text}])


def _tools(tokenizer: ChatTokenizer) -> Iterator[Asking]:
    system = TOOL_SYSTEM.format(tools="\n".join(map(json.dumps, TOOLS)))
    for number, (text, name, arguments) in enumerate(TOOL_QUESTIONS, 1):
        expected = json.dumps({"name": name, "arguments": arguments})
        yield Asking(f"tool {number}", _chat(tokenizer, text, system), TOOL_TOKENS, expected)


def _choices(tokenizer: ChatTokenizer) -> Iterator[Asking]:
    questions = [_question(row) for row in make_rows(NUM_CHOICES, CHOICE_SEED)]
    for prompt in make_choices(PRESETS["aisbench"], questions):
        ids = _chat(tokenizer, prompt.text)
        yield Asking(prompt.question.id, ids, CHOICE_TOKENS, prompt.key)


def _question(row: Sequence[str]) -> Question:
    text, correct, one, two, three, record_id, domain, _ = row
    return Question(record_id, "", domain, text, (correct, one, two, three))


def _needles(tokenizer: ChatTokenizer, context_tokens: int) -> Iterator[Asking]:
    lengths = tuple(length for length in NEEDLE_LENGTHS if length <= context_tokens)
    asked = Asked(lengths, NEEDLE_DEPTHS, 1, NEEDLE_TOKENS, "")
    for group in make_needles(tokenizer, asked).values():
        for prompt in group:
            name = f"{prompt.length} tokens at {prompt.depth} %"
            yield Asking(name, prompt.ids, NEEDLE_TOKENS, prompt.code)
