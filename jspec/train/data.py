"""Rows to train on: whole examples behind one another, in an order that is a pure function of
(seed, step), so that going on with a training takes the number of its step and nothing else.

Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

from jspec.errors import JspecError
from jspec.train.states import StateShard, read_states
from jspec.train.text import read_text

_READ = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
_HELD_OUT_EVERY = 50
_MOST_HELD_OUT = 128


class Piece(NamedTuple):
    """An example, or as much of it as fits in a row."""

    shard: int
    first: int
    """Where it begins in the shard's arrays."""
    length: int
    slot: int
    """Of its first token in the example."""
    prompt: int
    """Tokens of the example's prompt."""


class Corpus(NamedTuple):
    """The examples of some shards."""

    shards: tuple[StateShard, ...]
    taps: tuple[int, ...]
    """Those that are read."""
    learned: tuple[Piece, ...]
    held_out: tuple[Piece, ...]
    """About one example in fifty, for measuring; never learned from."""
    ahead: int = 2
    """Places on from an entry stands the token that it predicts."""


def open_corpus(
    files: Sequence[Path], taps: tuple[int, ...], sequence_length: int, *, ahead: int = 2
) -> Corpus:
    """The examples of shards of states, cut where they are longer than a row.

    Raises JspecError naming a shard that is missing, damaged or without one of `taps`, and where
    there is too little to learn from.
    """
    shards = [_with_taps(file, taps) for file in files]
    return _corpus(shards, files, taps, sequence_length, ahead)


def open_text(files: Sequence[Path], sequence_length: int) -> Corpus:
    """The same of shards of text, to learn the next token from; there are no hidden states."""
    return _corpus([_without_states(file) for file in files], files, (), sequence_length, 1)


def _corpus(
    shards: Sequence[StateShard],
    files: Sequence[Path],
    taps: tuple[int, ...],
    sequence_length: int,
    ahead: int,
) -> Corpus:
    examples = [
        (index, int(first), int(end), int(prompt))
        for index, shard in enumerate(shards)
        for first, end, prompt in zip(shard.starts, shard.ends, shard.prompts, strict=True)
    ]
    every = max(_HELD_OUT_EVERY, len(examples) // _MOST_HELD_OUT)
    learned, held_out = [], []
    for number, example in enumerate(examples):
        pieces = cut(*example, sequence_length, ahead=ahead)
        (learned if number % every else held_out).extend(pieces)
    if not learned or not held_out:
        folders = ", ".join(str(folder) for folder in dict.fromkeys(f.parent for f in files))
        raise JspecError(f"{folders}: {len(examples)} examples are too few to learn from")
    return Corpus(tuple(shards), taps, tuple(learned), tuple(held_out), ahead)


def _without_states(path: Path) -> StateShard:
    """Examples of text as a shard of states without any; `best` is void."""
    examples = list(read_text(path))
    texts = [np.asarray([*example.prompt, *example.answer], np.int32) for example in examples]
    tokens = np.concatenate([np.zeros(0, np.int32), *texts])
    return StateShard(
        tokens=tokens,
        ends=np.cumsum([len(text) for text in texts], dtype=np.int32),
        prompts=np.asarray([len(example.prompt) for example in examples], np.int32),
        best=np.zeros_like(tokens),
        hidden={},
    )


def _with_taps(path: Path, taps: tuple[int, ...]) -> StateShard:
    shard = read_states(path)
    for tap in taps:
        if tap not in shard.hidden:
            raise JspecError(f"{path}: lacks the hidden states of tap {tap}; make it again")
    return shard


def cut(
    shard: int, first: int, end: int, prompt: int, sequence_length: int, *, ahead: int = 2
) -> list[Piece]:
    """An example in pieces of at most `sequence_length`, those with nothing to learn left out."""
    pieces = []
    for slot in range(0, end - first, sequence_length):
        length = min(sequence_length, end - first - slot)
        piece = Piece(shard, first + slot, length, slot, prompt)
        if wanted(piece, ahead=ahead).any():
            pieces.append(piece)
    return pieces


def wanted(piece: Piece, prompts_too: bool = False, *, ahead: int = 2) -> np.ndarray:
    """`[length]` bool: the token `ahead` places on is in the piece and (or not) in the answer."""
    there = np.arange(piece.length) + ahead
    first = 0 if prompts_too else piece.prompt
    return (there < piece.length) & (piece.slot + there >= first)


def pack(lengths: Sequence[int], sequence_length: int, order: Sequence[int]) -> list[list[int]]:
    """Rows of items, in `order`, each item in the first row that has room for it."""
    rows: list[list[int]] = []
    room = np.empty(len(lengths), np.int64)
    for item in order:
        fits = room[: len(rows)] >= lengths[item]
        row = int(np.argmax(fits)) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            room[row] = sequence_length
        rows[row].append(item)
        room[row] -= lengths[item]
    return rows


class Rows:
    """Packed rows, made as they are asked for: a source for grain."""

    def __init__(
        self,
        corpus: Corpus,
        pieces: Sequence[Piece],
        order: Sequence[int],
        S: int,
        *,
        prompts_too: bool = False,
    ):
        self._corpus, self._pieces, self._length = corpus, pieces, S
        self._prompts_too = prompts_too
        self._rows = pack([piece.length for piece in pieces], S, order)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Arrays of one row, named as the fields of `step.Batch`."""
        row, at = self.empty(), 0
        for number, item in enumerate(self._rows[index], 1):
            piece = self._pieces[item]
            shard = self._corpus.shards[piece.shard]
            place = slice(at, at + piece.length)
            source = slice(piece.first, piece.first + piece.length)
            row["tokens"][place] = shard.tokens[source]
            row["segments"][place] = number
            row["positions"][place] = piece.slot + np.arange(piece.length)
            row["wanted"][place] = wanted(piece, self._prompts_too, ahead=self._corpus.ahead)
            row["best"][place] = shard.best[source]
            for tap, values in row["hidden"].items():
                values[place] = shard.hidden[tap][source]
            at += piece.length
        return row

    def empty(self) -> dict[str, Any]:
        """A row of padding."""
        S, hidden = self._length, self._corpus.shards[0].hidden
        numbers = ("tokens", "segments", "positions", "best")
        return {
            **{name: np.zeros((S,), np.int32) for name in numbers},
            "wanted": np.zeros((S,), np.bool_),
            "hidden": {
                tap: np.zeros((S, hidden[tap].shape[1]), hidden[tap].dtype)
                for tap in self._corpus.taps
            },
        }


def training_batches(
    corpus: Corpus, *, sequence_length: int, rows: int, seed: int, prompts_too: bool = False
) -> grain.MapDataset:
    """Batch i is what step i learns from: `[rows, S]` arrays, for ever. Examples are packed once,
    long ones first and those of one length in an order drawn from `seed`; each pass over them
    takes the rows in another order. `prompts_too`: they are learned from as answers are."""
    order = np.random.default_rng(seed).permutation(len(corpus.learned)).tolist()
    order.sort(key=lambda item: -corpus.learned[item].length)
    source = Rows(corpus, corpus.learned, order, sequence_length, prompts_too=prompts_too)
    endless = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    return endless.batch(rows, drop_remainder=True)  # else its length is rounded beyond what fits


def from_step(batches: grain.MapDataset, step: int) -> Any:
    """An iterator over the batches from `step` on, read ahead in a thread."""
    return iter(batches.slice(slice(step, None)).to_iter_dataset(_READ))


def held_out_batches(corpus: Corpus, *, sequence_length: int, rows: int) -> list[dict[str, Any]]:
    """The examples held out, in batches of the same shape, the last filled up with padding."""
    source = Rows(corpus, corpus.held_out, range(len(corpus.held_out)), sequence_length)
    numbers = range(-(-len(source) // rows) * rows)
    made = [source[i] if i < len(source) else source.empty() for i in numbers]
    return [_stacked(made[i : i + rows]) for i in range(0, len(made), rows)]


def _stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: _stacked([row[name] for row in rows])
        if isinstance(rows[0][name], dict)
        else np.stack([row[name] for row in rows])
        for name in rows[0]
    }


def answer_counts(shards: Sequence[StateShard], vocab_size: int) -> np.ndarray:
    """`[V]`: how often each token was said in an answer."""
    counts = np.zeros(vocab_size, np.int64)
    for shard in shards:
        for first, end, prompt in zip(shard.starts, shard.ends, shard.prompts, strict=True):
            counts += np.bincount(shard.tokens[first + prompt : end], minlength=vocab_size)
    return counts
