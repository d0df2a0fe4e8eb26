"""Measure the embedded model through transformers and print the table of its model card.

Usage: python tests/golden/measure_embedded.py

Greedy answers in float32 to prompts written here with a fixed seed; a task counts as solved when
the text after the thinking part is exactly the expected one. Loss is taken over prompt.txt, which
was written for this repository and is in no training data.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parent
MODEL = FOLDER.parents[1] / "deploy" / "models" / "tiny-flash-next"
WORDS = (
    "apple", "river", "stone", "cloud", "tiger", "lamp",
    "piano", "silver", "garden", "rocket", "window", "bridge",
)  # fmt: skip
Task = tuple[str, str]  # what the user says, the expected answer


def counting(r: random.Random) -> Task:
    first, length = r.randint(1, 50), r.randint(3, 12)
    numbers = range(first, first + length + 1)
    return f"Count from {first} to {first + length}.", " ".join(map(str, numbers))


def repeating(r: random.Random) -> Task:
    words = " ".join(r.sample(WORDS, r.randint(2, 6)))
    return f"Repeat these words: {words}", words


def sorting(r: random.Random) -> Task:
    words = r.sample(WORDS, r.randint(2, 6))
    return f"Sort these words: {' '.join(words)}", " ".join(sorted(words))


def addition(r: random.Random) -> Task:
    a, b = r.randint(0, 99), r.randint(0, 99)
    return f"What is {a} + {b}?", str(a + b)


def retrieval(characters: int) -> Callable[[random.Random], Task]:
    text = (FOLDER / "prompt.txt").read_text()

    def task(r: random.Random) -> Task:
        word, code = r.choice(WORDS), str(r.randint(10000, 99999))
        lines = text[:characters].split("\n")
        lines.insert(r.randint(0, len(lines)), f"The secret code for {word} is {code}.")
        question = f"What is the secret code for {word}?"
        answer = f"The secret code for {word} is {code}."
        return "\n".join(lines) + "\n\n" + question, answer

    return task


TASKS: dict[str, Callable[[random.Random], Task]] = {
    "count upwards (4 to 13 numbers)": counting,
    "repeat 2 to 6 words": repeating,
    "sort 2 to 6 words": sorting,
    "add two numbers below 100": addition,
    "find a code in about 250 tokens": retrieval(600),
    "find a code in about 1,000 tokens": retrieval(3000),
}


@torch.inference_mode()
def solve(model: Any, tokenizer: Any, task: Task) -> bool:
    chat = [{"role": "user", "content": task[0]}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    prompt = torch.tensor([ids])
    out = model.generate(prompt, max_new_tokens=64, do_sample=False)[0, len(ids) :]
    text = tokenizer.decode(out, skip_special_tokens=True)
    return bool(text.rpartition("</think>")[2].strip() == task[1])


@torch.inference_mode()
def loss(model: Any, tokenizer: Any) -> tuple[float, int]:
    """Mean negative log likelihood a token in nats, and the number of tokens."""
    ids = torch.tensor([tokenizer((FOLDER / "prompt.txt").read_text()).input_ids])
    logits = model(ids).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item(), ids.shape[1]


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    nats, count = loss(model, tokenizer)
    print("| measured | result |\n|---|---|")
    print(f"| perplexity of {count} tokens of unseen prose | {math.exp(nats):.1f} |")
    for name, make in TASKS.items():
        r = random.Random(11)
        tasks = [make(r) for _ in range(10)]
        print(f"| {name} | {sum(solve(model, tokenizer, task) for task in tasks)} of 10 |")


if __name__ == "__main__":
    main()
