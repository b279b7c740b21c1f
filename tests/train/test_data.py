"""Packing, masks and order of the rows."""

from __future__ import annotations

import numpy as np
import pytest

from jspec.errors import JspecError
from jspec.train import data
from jspec.train.data import Corpus, Piece, Rows, cut, pack, wanted
from jspec.train.states import StateShard, state_shards


def shard(*examples: tuple[int, int]) -> StateShard:
    """Examples of (tokens, prompt tokens); tokens, best and features number the places."""
    ends = np.cumsum([n for n, _ in examples]).astype(np.int32)
    index = np.arange(ends[-1], dtype=np.int32)
    return StateShard(
        tokens=index,
        ends=ends,
        prompts=np.array([p for _, p in examples], np.int32),
        best=index + 100,
        hidden={2: np.stack([index, -index], axis=1).astype(np.float32)},
    )


def test_the_entry_counts_whose_prediction_is_in_the_answer():
    """Entry s predicts token s + 2: of p p a a a, tokens 2, 3 and 4."""
    assert wanted(Piece(0, 0, 5, 0, prompt=2)).tolist() == [True, True, True, False, False]
    assert wanted(Piece(0, 0, 5, 0, prompt=4)).tolist() == [False, False, True, False, False]
    assert wanted(Piece(0, 9, 3, 9, prompt=4)).tolist() == [True, False, False]
    assert wanted(Piece(0, 0, 4, 0, prompt=4), prompts_too=True).tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_long_examples_are_cut_and_bare_prompts_dropped():
    assert cut(0, 10, 20, 7, sequence_length=4) == [
        Piece(0, 14, 4, 4, 7),
        # slots 8 and 9 predict nothing that is there
    ]
    assert cut(1, 0, 6, 1, sequence_length=8) == [Piece(1, 0, 6, 0, 1)]


def test_first_row_with_room():
    assert pack([5, 4, 3, 2, 6], 8, [0, 1, 2, 3, 4]) == [[0, 2], [1, 3], [4]]
    assert pack([5, 4, 3, 2, 6], 8, [4, 3, 2, 1, 0]) == [[4, 3], [2, 1], [0]]


def test_a_row_has_its_examples_whole_and_apart():
    corpus = Corpus((shard((3, 1), (4, 2)),), (2,), (), ())
    pieces = [Piece(0, 3, 4, 0, 2), Piece(0, 0, 3, 0, 1)]
    (row,) = [Rows(corpus, pieces, [0, 1], 9)[0]]
    assert row["tokens"].tolist() == [3, 4, 5, 6, 0, 1, 2, 0, 0]
    assert row["best"].tolist() == [103, 104, 105, 106, 100, 101, 102, 0, 0]
    assert row["segments"].tolist() == [1, 1, 1, 1, 2, 2, 2, 0, 0]
    assert row["positions"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 0]
    assert row["wanted"].tolist() == [True, True, False, False, True] + [False] * 4
    assert row["hidden"][2][:, 1].tolist() == [-3, -4, -5, -6, 0, -1, -2, 0, 0]


def shards_of(folder, *numbers):
    return [state_shards(folder).path(number) for number in numbers]


@pytest.fixture(scope="module")
def corpus(states):
    return data.open_corpus(shards_of(states, 0, 1, 2), (2,), 64)


def batches(corpus, seed):
    return data.training_batches(corpus, sequence_length=64, rows=2, seed=seed)


def test_a_batch_is_a_function_of_seed_and_step(corpus):
    one, again, other = batches(corpus, 0), batches(corpus, 0), batches(corpus, 1)
    for step in (0, 3, 50):
        np.testing.assert_array_equal(one[step]["tokens"], again[step]["tokens"])
    assert any((one[i]["tokens"] != other[i]["tokens"]).any() for i in range(3))
    alone = data.training_batches(corpus, sequence_length=64, rows=1, seed=0)
    np.testing.assert_array_equal(next(data.from_step(alone, 2))["tokens"], one[1]["tokens"][:1])
    late = data.from_step(again, 3)
    for step in (3, 4, 5):
        np.testing.assert_array_equal(next(late)["tokens"], one[step]["tokens"])


def test_an_epoch_has_every_example_once_and_none_held_out(corpus):
    made = data.training_batches(corpus, sequence_length=64, rows=1, seed=0)
    order = sorted(range(len(corpus.learned)), key=lambda i: -corpus.learned[i].length)
    steps = len(Rows(corpus, corpus.learned, order, 64))  # ties do not change their number
    total = sum(piece.length for piece in corpus.learned)
    assert steps < 1.1 * total / 64  # rows are nearly full
    epochs = [[made[step] for step in range(first, first + steps)] for first in (0, steps)]
    first, second = ([b["tokens"][0].tolist() for b in epoch] for epoch in epochs)
    assert sorted(first) == sorted(second)
    assert first != second  # each epoch has its own order
    assert sum(int((b["segments"] > 0).sum()) for b in epochs[0]) == total
    places = {(p.shard, p.first) for p in corpus.learned}
    held_out = {(p.shard, p.first) for p in corpus.held_out}
    assert (len(places), len(held_out)) == (88, 2)
    assert not places & held_out


def test_held_out_batches_have_the_shape_of_the_others(corpus):
    (batch,) = data.held_out_batches(corpus, sequence_length=64, rows=3)
    assert batch["tokens"].shape == (3, 64)
    assert batch["hidden"][2].shape == (3, 64, 32)
    held_out = sum(piece.length for piece in corpus.held_out)
    assert int((batch["segments"] > 0).sum()) == held_out


def test_answers_are_counted_without_prompts():
    assert data.answer_counts([shard((3, 1), (3, 2))], 8).tolist() == [0, 1, 1, 0, 0, 1, 0, 0]


def test_what_is_missing_is_named(states, tmp_path):
    with pytest.raises(JspecError, match=r"00009\.safetensors: no such file"):
        data.open_corpus(shards_of(states, 9), (2,), 64)
    with pytest.raises(JspecError, match=r"00000\.safetensors: lacks .* tap 7"):
        data.open_corpus(shards_of(states, 0), (2, 7), 64)
