"""A gang that knows every code, forgets nothing, and fails where a test says so."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from deploy.certify.certification import Answers, Certification, Pool
from deploy.certify.evidence_file import EvidenceFile
from deploy.certify.needles import make_prompts, prompts_sha256
from placement.evidence import Asked, Binding, Evidence, Pass
from rank_worker.launch import GenerationResult
from rank_worker.messages import EngineRequest, FinishReason

END = 1
BINDING = Binding("plan", "engine", "files", "revision")
LENGTHS, DEPTHS, SEQUENCES = (150, 300), (0, 50, 100), 4
Key = tuple[Pass, int, int]


class WordTokenizer:
    """A token a word, the same in every process; a chat begins and ends with one of its own."""

    def __init__(self) -> None:
        self._words: dict[int, str] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        words = text.split()
        ids = tuple(zlib.crc32(word.encode()) + 10 for word in words)
        self._words |= dict(zip(ids, words, strict=True))
        return ids

    def encode_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        return (2, *self.encode(messages[0]["content"]), 3)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._words.get(number, "") for number in ids)


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Script:
    """What gangs do; `ran` is what they did.

    Faults by cell: "wrong" code, "other" ids, others "again" only, "short", "error", "cold", "hot".
    """

    encode: Callable[[str], tuple[int, ...]]
    decode: Callable[[Sequence[int]], str]
    end: int = END
    faults: dict[Key, str] = field(default_factory=dict)
    reuses: bool = True
    preempts: int = 0  # sequences of a fill
    holds: int = 9  # sequences at once
    pages: int = 100  # of 64 tokens
    ends_after: int = -1  # calls; then `end_by` is raised
    end_by: BaseException = field(default_factory=Killed)
    gangs: int = 0
    ran: list[Key] = field(default_factory=list)

    @contextmanager
    def start(self, stages: Sequence[Pass]) -> Iterator[ScriptedGang]:
        self.gangs += 1
        yield ScriptedGang(self)


class ScriptedGang:
    def __init__(self, script: Script) -> None:
        self._script = script
        self._seen: set[tuple[int, ...]] = set()
        self._preemptions = 0

    def preemptions(self) -> int:
        return self._preemptions

    def generate(self, requests: Sequence[EngineRequest]) -> list[GenerationResult]:
        script = self._script
        if script.ends_after == 0:
            raise script.end_by
        script.ends_after -= 1
        if len(requests) > 1:
            self._preemptions += script.preempts
        turns = [place // script.holds for place in range(len(requests))]
        return [self._answer(*pair) for pair in zip(requests, turns, strict=True)]

    def _answer(self, request: EngineRequest, turn: int) -> GenerationResult:
        script, ids = self._script, request.prompt_ids
        assert request.ignore_eos
        _, stage, length, index = request.request_id.split("-")
        key = (Pass(stage), int(length), int(index))
        script.ran.append(key)
        fault = script.faults.get(key, "")
        again = ids in self._seen
        cached = 64 if script.reuses and again else 0
        self._seen.add(ids)
        found = re.search(r"code for (\w+) is (\d+)", script.decode(ids))
        assert found is not None
        code = "99" if fault == "wrong" else found[2]
        said = (*script.encode(f"The secret code for {found[1]} is {code} ."), script.end)
        made = (said + ids * 9)[: request.max_tokens]
        if fault == "other" or (fault == "again" and again):
            made = (made[1], *made[1:])
        if fault == "short":
            made = made[:-1]
        return GenerationResult(
            request_id=request.request_id,
            token_ids=made,
            finish_reason=FinishReason.ERROR if fault == "error" else FinishReason.LENGTH,
            prompt_tokens=len(ids),
            cached_tokens={"cold": 0, "hot": 64}.get(fault, cached),
            draft_tokens=0,
            accepted_tokens=0,
            ttft_s=turn + 0.1,
            last_token_s=turn + 0.5,
            error="logits are not finite" if fault == "error" else None,
        )


def scripted() -> Script:
    words = WordTokenizer()
    return Script(words.encode, words.decode)


def certify(
    path: Path, script: Script, overwrite: bool = False, binding: Binding = BINDING,
    lengths: tuple[int, ...] = LENGTHS,
) -> Evidence:  # fmt: skip
    """A session on `path`, as the command has it."""
    words = WordTokenizer()
    script.encode, script.decode = words.encode, words.decode
    asked = Asked(lengths, DEPTHS, SEQUENCES, 20, "")
    prompts = make_prompts(words, asked)
    wanted = Evidence("model", binding, replace(asked, prompts_sha256=prompts_sha256(prompts)))
    with closing(EvidenceFile(path, wanted, overwrite)) as file:
        pool = Pool(script.pages, 64, script.reuses)
        answers = Answers(words.decode, (END,))
        return Certification(file, prompts, answers, script.start, pool, lambda *_: None).run()
