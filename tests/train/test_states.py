"""Text and hidden states: whole shards, resumed, and the engine's own numbers."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import tiny
from tiny_training import CONFIG, TARGET, silent, write_text_shards

from jspec import cache as cache_lib
from jspec.errors import JspecError
from jspec.model import llama
from jspec.train import tensors
from jspec.train.shards import Shards
from jspec.train.states import (
    eagle3_taps,
    padded_length,
    parse_taps,
    passes,
    read_states,
    state_shards,
    write_states,
)
from jspec.train.text import read_text, text_shards, write_text


def test_a_folder_is_begun_with_settings_once(tmp_path):
    shards = Shards(tmp_path / "x", "bin")
    shards.open({"a": (1, 2), "b": "c"})
    shards.open({"b": "c", "a": [1, 2]})
    shards.write(3, b"abc")
    shards.write(0, b"def")
    assert shards.numbers() == [0, 3]
    assert sorted(p.name for p in shards.folder.iterdir()) == [
        "00000.bin",
        "00003.bin",
        "settings.json",
    ]
    with pytest.raises(JspecError, match=r"begun with b='c', not 'd'"):
        shards.open({"a": [1, 2], "b": "d"})
    with pytest.raises(JspecError, match=r"no settings\.json"):
        Shards(tmp_path, "bin").settings()
    (shards.folder / "settings.json").write_text("{")
    with pytest.raises(JspecError, match="damaged"):
        shards.settings()


def answered(llm, folder, num_prompts=10):
    write_text(
        llm,
        [[i + 1, i + 2] for i in range(num_prompts)],
        folder,
        shard_size=4,
        temperatures=[0.0, 0.9],
        max_tokens=6,
        seed=5,
        settings={"model": "tiny"},
        progress=silent,
    )
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_text_goes_on_where_it_stopped(llm, tmp_path):
    whole = answered(llm, tmp_path / "a")
    assert sorted(whole) == ["00000.jsonl", "00001.jsonl", "00002.jsonl", "settings.json"]
    assert json.loads(whole["settings.json"]) == {
        "num_prompts": 10,
        "shard_size": 4,
        "temperatures": [0.0, 0.9],
        "max_tokens": 6,
        "seed": 5,
        "model": "tiny",
    }
    (tmp_path / "a" / "00001.jsonl").unlink()
    assert answered(llm, tmp_path / "a") == whole
    first, *_ = read_text(tmp_path / "a" / "00000.jsonl")
    plain = tiny.uncached_greedy(llama(CONFIG), TARGET.params, [1, 2], 6)
    assert [*first.prompt, *first.answer] == plain
    with pytest.raises(JspecError, match="num_prompts"):
        answered(llm, tmp_path / "a", num_prompts=9)


def test_a_damaged_line_of_text_is_named(tmp_path):
    path = tmp_path / "00000.jsonl"
    path.write_text('{"prompt": [1], "answer": [2]}\n{"prompt": [1]}\n')
    with pytest.raises(JspecError, match=r"00000\.jsonl:2: not an example"):
        list(read_text(path))


def test_taps():
    assert eagle3_taps(30) == (2, 15, 27)
    assert eagle3_taps(2) == (0, 1)
    assert parse_taps("final", 30) == (30,)
    assert parse_taps("eagle3", 30) == (2, 15, 27, 30)
    assert parse_taps("all", 2) == (0, 1, 2)
    assert parse_taps("7,3", 30) == (3, 7, 30)
    for wrong in ("31", "-1", "x"):
        with pytest.raises(JspecError, match=wrong):
            parse_taps(wrong, 30)


def test_texts_of_like_length_run_together():
    assert [padded_length(n) for n in (1, 64, 65, 96, 97, 128, 129, 192, 193, 300)] == [
        *(64, 64, 96, 96, 128, 128, 192, 192, 256, 384)
    ]
    groups = list(passes([100, 5, 5000, 90, 128, 7]))
    assert groups == [([1, 5], 64), ([3], 96), ([0, 4], 128), ([2], 6144)]
    assert [len(g) for g, _ in passes([200] * 20)] == [8, 8, 4]


def test_states_are_those_of_the_engine(states):
    """Against chunked prefill: the same tokens, read in other blocks over committed pages."""
    shard = read_states(state_shards(states).path(1))
    text = list(read_text(states.parent / "text" / "00001.jsonl"))
    assert shard.prompts.tolist() == [len(e.prompt) for e in text]
    assert shard.tokens.tolist() == [t for e in text for t in (*e.prompt, *e.answer)]
    model = llama(CONFIG)
    for number in (0, 7):
        place = slice(shard.starts[number], shard.ends[number])
        tokens = np.array(shard.tokens[place])[None]
        hidden, best = _by_steps(model, tokens)
        np.testing.assert_array_equal(shard.best[place], best)
        for tap in (0, 1, 2):
            np.testing.assert_allclose(
                shard.hidden[tap][place].astype(np.float32), hidden[tap], rtol=1e-2, atol=1e-4
            )


def _by_steps(model, tokens):
    """Hidden states `[taps][n, D]` and likeliest tokens `[n]`, a block of three at a time."""
    spec, n = model.cache_spec, tokens.shape[1]
    cache = cache_lib.init_cache(spec, 1, n + 3, page_size=8, dtype=np.float32)
    forward = jax.jit(lambda x, c: model.forward(TARGET.params, x, cache_lib.open_block(c, 3)))
    padded = np.pad(tokens, ((0, 0), (0, 3)))
    hidden, best = [[] for _ in range(3)], []
    for first in range(0, n, 3):
        out = forward(padded[:, first : first + 3], cache)
        cache = cache_lib.commit(out.cache, np.array([3], np.int32))
        best += np.argmax(out.logits[0], -1).tolist()
        for mine, new in zip(hidden, out.hidden, strict=True):
            mine.append(np.asarray(new[0]))
    return [np.concatenate(parts)[:n] for parts in hidden], best[:n]


def test_states_are_added_for_new_text_only(tmp_path):
    text = write_text_shards(tmp_path / "text", 2, examples=3)

    def make(taps=(2,)):
        return write_states(TARGET, text, tmp_path / "states", taps=taps, progress=silent)

    assert make() == 2
    path = tmp_path / "states" / "00000.safetensors"
    before, stamp = path.read_bytes(), path.stat().st_mtime_ns
    write_text_shards(text, 1, examples=3, first=2)
    assert make() == 1
    assert path.stat().st_mtime_ns == stamp
    assert state_shards(tmp_path / "states").numbers() == [0, 1, 2]
    path.unlink()
    assert make() == 1
    assert path.read_bytes() == before
    with pytest.raises(JspecError, match=r"begun with taps=\[2\]"):
        make((1, 2))


def test_what_is_wrong_with_text_is_said(tmp_path):
    folder = write_text_shards(tmp_path / "text", 0)
    with pytest.raises(JspecError, match="no text in it yet"):
        write_states(TARGET, folder, tmp_path / "a", taps=(2,), progress=silent)
    text_shards(folder).write(0, b'{"prompt": [1], "answer": [61]}\n')
    with pytest.raises(JspecError, match=r"00000\.jsonl: token 61 is not one of the model's 61"):
        write_states(TARGET, folder, tmp_path / "a", taps=(2,), progress=silent)
    with pytest.raises(JspecError, match="nowhere"):
        write_states(TARGET, tmp_path / "nowhere", tmp_path / "b", taps=(2,), progress=silent)


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    whole = tensors.to_bytes({"tokens": np.arange(3, dtype=np.int32)})
    for content in (b"", whole[:4], whole[:-1], whole + b"x", b"\xff" * 40):
        path.write_bytes(content)
        with pytest.raises(JspecError, match=r"x\.safetensors: truncated or damaged"):
            read_states(path)
    path.write_bytes(whole)
    assert tensors.open_file(path)["tokens"].tolist() == [0, 1, 2]
    with pytest.raises(JspecError, match="not a shard of states"):
        read_states(path)
    ends = np.array([2], np.int32)
    arrays = {"tokens": np.arange(3, dtype=np.int32), "ends": ends, "prompts": ends, "best": ends}
    path.write_bytes(tensors.to_bytes(arrays))
    with pytest.raises(JspecError, match="do not fit"):
        read_states(path)
