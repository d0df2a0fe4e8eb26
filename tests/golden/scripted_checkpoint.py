"""Write a small checkpoint of the hybrid sparse-attention family that says given bytes.

Every sub-layer's output projection is zero, so the streams stay the embedding of the newest token;
the row of the output head of a token's successor is that embedding. Greedy decoding then walks the
chain from a prompt token over the pieces of its script to the end token, and so does sampling: the
margin is tens of logits. All else is random as in `tiny_checkpoint`: states and caches are alive,
but nothing reads them, so text is all that this checkpoint tests.

A token has one successor. So each piece has an id of its own, however often its bytes occur; a
Unigram vocabulary allows equal strings. The draft head sees the embedding of the newest token only
and follows the same chain, with wrong guesses at chosen places.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.golden import tiny_checkpoint

END, THINK_OPEN, THINK_CLOSE = "<|im_end|>", "<think>", "</think>"  # special tokens
JUNK = 0  # the wrong guess of the draft head: a byte token that no script has
LAYERS = 4  # three recurrent ones, the second with the n-gram embedding, and one with attention

# Dimensions of an embedding: a code of +-1, then one flag each.
_CODE = tiny_checkpoint.HIDDEN - 3
_ENDS, _MISSES, _GUESS = range(_CODE, tiny_checkpoint.HIDDEN)
_LARGEST_OVERLAP = 29  # of two codes: a wrong token's logit is at most half the right one's
_GAIN = 4.0

_SILENT = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "value_proj.weight")
_NEUTRAL = ("hyper_connection_mixer.", "mtp.pre_fc_norm_", "mtp.fc_hidden.")  # zero, and 1 + w

Piece = bytes | str


@dataclass(frozen=True)
class Script:
    """What follows a prompt that ends with the token `prompt`: the pieces, then the end token.

    A piece is the bytes of one token, whole characters or not, or the name of a special token,
    which no other script can have. The draft head misses the pieces at the places `missed`; the
    place of the end token is the number of pieces.
    """

    prompt: str
    pieces: tuple[Piece, ...]
    missed: frozenset[int] = frozenset()

    def text(self, count: int | None = None) -> str:
        """What the first `count` pieces say, or all of them. Special tokens say nothing."""
        data = [piece for piece in self.pieces[:count] if isinstance(piece, bytes)]
        return b"".join(data).decode("utf-8", "replace")


@dataclass(frozen=True)
class ScriptedCheckpoint:
    folder: Path
    chains: Mapping[str, tuple[int, ...]]  # of a script's prompt: its id, its pieces', the end's

    @property
    def end_id(self) -> int:
        return next(iter(self.chains.values()))[-1]


def scripted_checkpoint(
    folder: Path, scripts: tuple[Script, ...], drafts: bool = True
) -> ScriptedCheckpoint:
    """Write config, weights, tokenizer and chat template to `folder`.

    The template joins the messages' contents and adds nothing: a chat whose last message ends with
    a script's prompt gets that script. Without `drafts` every guess of the draft head is JUNK.
    """
    pieces = [piece for script in scripts for piece in script.pieces if isinstance(piece, bytes)]
    vocabulary = [bytes([byte]) for byte in range(256)] + pieces
    names = [END, THINK_OPEN, THINK_CLOSE, *(script.prompt for script in scripts)]
    special = {name: len(vocabulary) + index for index, name in enumerate(names)}
    _check(pieces, names, special)
    chains = _chains(scripts, special)
    _write_tokenizer(folder, vocabulary, special)
    size = len(vocabulary) + len(special)
    _write_weights(folder, _rows(scripts, chains, size, special[END]), drafts)
    _write_config(folder, size, special[END])
    return ScriptedCheckpoint(folder, chains)


def _check(pieces: list[bytes], names: list[str], special: Mapping[str, int]) -> None:
    if b"" in pieces:
        raise ValueError("a piece without bytes can't be told from no token")
    if len(special) < len(names):
        raise ValueError(f"two scripts have one prompt: {sorted(names)}")
    if same := {piece.decode("utf-8", "replace") for piece in pieces} & special.keys():
        raise ValueError(f"{min(same)!r} is a special token: give its name, or two pieces")


def _chains(scripts: tuple[Script, ...], special: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    chains = {}
    free, taken = 256, {special[END]}
    for script in scripts:
        ids = []
        for piece in (script.prompt, *script.pieces):
            token = free if isinstance(piece, bytes) else special[piece]
            if token in taken:
                raise ValueError(f"{script.prompt}: {piece!r} has a successor already")
            free += isinstance(piece, bytes)
            taken.add(token)
            ids.append(token)
        chains[script.prompt] = (*ids, special[END])
    return chains


def _codes(count: int) -> Tensor:
    """[count, _CODE] of +-1, no two alike or opposite, the same everywhere."""
    generator = torch.Generator().manual_seed(11)
    codes = torch.zeros(count, _CODE)
    for index in range(count):
        while True:
            code = torch.randint(0, 2, (_CODE,), generator=generator) * 2.0 - 1
            if not index or (codes[:index] @ code).abs().max() <= _LARGEST_OVERLAP:
                break
        codes[index] = code
    return codes


def _rows(
    scripts: tuple[Script, ...], chains: Mapping[str, tuple[int, ...]], vocab: int, end: int
) -> tuple[Tensor, Tensor]:
    """Embedding and output head, [vocab, hidden] each. What has no successor is followed by END."""
    embedding, head = torch.zeros(2, vocab, tiny_checkpoint.HIDDEN)
    embedding[:, :_CODE] = _codes(vocab)
    embedding[:, _ENDS] = 1
    head[end, _ENDS] = _GAIN * _CODE
    head[JUNK, _GUESS] = 2 * _GAIN * _CODE
    for script in scripts:
        for place, (token, following) in enumerate(pairwise(chains[script.prompt])):
            embedding[token, _MISSES] = place in script.missed
            if following != end:
                embedding[token, _ENDS] = 0
                head[following, :_CODE] = _GAIN * embedding[token, :_CODE]
    return embedding, head


def _guess(drafts: bool) -> Tensor:
    """The draft head's projection of an embedding: the same again, or JUNK where it misses."""
    projection = torch.zeros(tiny_checkpoint.HIDDEN, tiny_checkpoint.HIDDEN)
    if drafts:
        kept = range(_ENDS + 1)
        projection[kept, kept] = 1
        projection[_GUESS, _MISSES] = 1
    return projection


def _write_weights(folder: Path, rows: tuple[Tensor, Tensor], drafts: bool) -> None:
    tiny_checkpoint.write(tiny_checkpoint.Variant(layers=LAYERS), folder)
    embedding, head = rows
    given = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "mtp.fc_embedding.weight": _guess(drafts),
    }
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(_SILENT) or any(part in name for part in _NEUTRAL):
                tensors[name] = torch.zeros_like(tensor)
        tensors |= {name: given[name] for name in tensors.keys() & given.keys()}
        save_file(tensors, file)


def _write_config(folder: Path, vocab: int, end: int) -> None:
    config = tiny_checkpoint.config(tiny_checkpoint.Variant(layers=LAYERS))
    config |= {"vocab_size": vocab, "eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"eos_token_id": [end], "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def _write_tokenizer(folder: Path, vocabulary: list[bytes], special: Mapping[str, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = _alphabet()
    # Text of a prompt is cut into bytes: a piece scores below any number of them.
    scores = [-1.0] * 256 + [-1e6] * (len(vocabulary) - 256)
    words = ["".join(alphabet[byte] for byte in piece) for piece in vocabulary]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": name, **flags, "special": True}
            for name, index in special.items()
        ],
        "pre_tokenizer": {**level, "use_regex": False},
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [list(entry) for entry in zip(words, scores, strict=True)],
            "byte_fallback": False,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)


def _alphabet() -> list[str]:
    """The character of each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(0x100 + others.index(b)) for b in range(256)]
