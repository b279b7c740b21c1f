"""Hidden states of the target over its own text, made once: what heads learn from.

A shard of states belongs to the shard of text with its number: every example of it, prompt and
answer, as the engine's own forward pass sees them.

    tokens     [n]      int32     the examples one behind the other
    ends       [E]      int32     where each ends
    prompts    [E]      int32     tokens of its prompt
    best       [n]      int32     the target's likeliest next token after each
    hidden.i   [n, D]   bfloat16  entry i of `model.Output.hidden`, for each tap i

Knows nothing of heads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec import cache as cache_lib
from jspec.config import ModelConfig
from jspec.draws import argmax
from jspec.errors import JspecError
from jspec.model import llama, unembed
from jspec.params import Params
from jspec.train import tensors
from jspec.train.settings import Progress
from jspec.train.shards import Shards
from jspec.train.text import Example, read_text, text_shards

_PASS_TOKENS = 2048
"""Tokens of a forward pass, padding included; longer examples run alone."""
_LOGITS_TOKENS = 256
"""Tokens whose logits over the whole vocabulary exist at one time."""
_PAGE_SIZE = 16


class TargetOfText(NamedTuple):
    """The model whose states these are."""

    name: str
    config: ModelConfig
    params: Params


class StateShard(NamedTuple):
    """The examples of one file; arrays as in the module's docstring, read as they are used."""

    tokens: np.ndarray
    ends: np.ndarray
    prompts: np.ndarray
    best: np.ndarray
    hidden: dict[int, np.ndarray]

    @property
    def starts(self) -> np.ndarray:
        """`[E]`, where each example begins."""
        return np.concatenate([[0], self.ends[:-1]]) if self.ends.size else self.ends


def state_shards(folder: Path) -> Shards:
    """The files of a folder of states."""
    return Shards(folder, "safetensors")


def eagle3_taps(num_layers: int) -> tuple[int, ...]:
    """The three depths that EAGLE-3 fuses, as entries of `Output.hidden`: the inputs of layers 2,
    L // 2 and L - 3 (FACTS D.2); of a model too shallow for three, those that it has."""
    wanted = (min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0))
    return tuple(sorted(set(wanted)))


def parse_taps(text: str, num_layers: int) -> tuple[int, ...]:
    """Entries of `Output.hidden`, ascending, of "final", "eagle3", "all" or "2,15": always with the
    final one, which the targets are made from."""
    named = {
        "final": (),
        "eagle3": eagle3_taps(num_layers),
        "all": tuple(range(num_layers)),
    }
    try:
        taps = named[text] if text in named else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise JspecError(f"taps {text!r}: give final, eagle3, all or numbers, as 2,15") from None
    wrong = [tap for tap in taps if not 0 <= tap <= num_layers]
    if wrong:
        raise JspecError(f"tap {wrong[0]}: a model of {num_layers} layers has 0 to {num_layers}")
    return tuple(sorted({*taps, num_layers}))


def fingerprint(params: Params) -> str:
    """A digest that two models only share if their final norm and (a sample of) their lm_head
    agree in bfloat16: enough to tell whose states these are."""
    head = params.embed if params.lm_head is None else params.lm_head
    sample = head[:: max(head.shape[0] // 64, 1)]
    digest = hashlib.sha256()
    for leaf in (params.final_norm, sample):
        digest.update(np.asarray(leaf.astype(jnp.bfloat16)).tobytes())
    return digest.hexdigest()[:16]


def digest_of(settings: dict[str, Any]) -> str:
    """A short name of a folder's settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def write_states(
    target: TargetOfText,
    text: Path,
    folder: Path,
    *,
    taps: Sequence[int],
    progress: Progress,
) -> int:
    """A shard of states is in `folder` for every shard of text there is; those already there stay.

    Returns how many were new. Raises JspecError where `folder` was begun with other text, taps or
    another model, and for text with tokens that the model lacks.
    """
    source, shards = text_shards(text), state_shards(folder)
    config, dtype = target.config, target.params.embed.dtype
    shards.open(
        {
            "model": target.name,
            "weights": fingerprint(target.params),
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_layers": config.num_hidden_layers,
            "computed_in": str(dtype),
            "taps": list(taps),
            "text": digest_of(source.settings()),
        }
    )
    numbers = source.numbers()
    if not numbers:
        raise JspecError(f"{text}: no text in it yet; run jspec train text")
    done = set(shards.numbers())
    missing = [number for number in numbers if number not in done]
    for i, number in enumerate(missing):
        progress("states", i, len(missing))
        examples = _checked(source.path(number), config.vocab_size)
        shards.write(number, tensors.to_bytes(_states(target, examples, tuple(taps))))
    progress("states", len(missing), len(missing))
    return len(missing)


def _checked(path: Path, vocab_size: int) -> list[Example]:
    examples = list(read_text(path))
    for example in examples:
        for token in (*example.prompt, *example.answer):
            if not 0 <= token < vocab_size:
                raise JspecError(f"{path}: token {token} is not one of the model's {vocab_size}")
    if not examples or not all(example.prompt for example in examples):
        raise JspecError(f"{path}: an example without a prompt, or none at all; make it again")
    return examples


def _states(
    target: TargetOfText, examples: Sequence[Example], taps: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """The arrays of a shard."""
    texts = [[*example.prompt, *example.answer] for example in examples]
    ends = np.cumsum([len(text) for text in texts], dtype=np.int32)
    total, width = int(ends[-1]), target.config.hidden_size
    hidden = {tap: np.empty((total, width), jnp.bfloat16) for tap in taps}
    best = np.empty(total, np.int32)
    for group, length in passes([len(text) for text in texts]):
        rows = max(_PASS_TOKENS // length, 1)
        tokens = np.zeros((rows, length), np.int32)
        for row, index in enumerate(group):
            tokens[row, : len(texts[index])] = texts[index]
        found, likeliest = jax.device_get(
            _forward(target.params, tokens, config=target.config, taps=taps)
        )
        for row, index in enumerate(group):
            n = len(texts[index])
            place = slice(ends[index] - n, ends[index])
            best[place] = likeliest[row, :n]
            for tap, values in zip(taps, found, strict=True):
                hidden[tap][place] = values[row, :n]
    return {
        "tokens": np.concatenate([np.asarray(text, np.int32) for text in texts]),
        "ends": ends,
        "prompts": np.asarray([len(example.prompt) for example in examples], np.int32),
        "best": best,
        **{f"hidden.{tap}": values for tap, values in hidden.items()},
    }


def passes(lengths: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Groups of examples that run together, each with the length that they are padded to.

    Padded lengths are 64, 96, 128, 192, 256, ...: a program each, a third of padding at most.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    groups: dict[int, list[int]] = {}
    for index in order:
        groups.setdefault(padded_length(lengths[index]), []).append(index)
    for length, members in groups.items():
        rows = max(_PASS_TOKENS // length, 1)
        for first in range(0, len(members), rows):
            yield members[first : first + rows], length


def padded_length(length: int) -> int:
    """The least of 64, 96, 128, 192, 256, 384, ... that is not less than `length`."""
    power = max(64, 1 << (max(length, 1) - 1).bit_length())
    return power * 3 // 4 if 64 < length <= power * 3 // 4 else power


@functools.partial(jax.jit, static_argnames=("config", "taps"))
def _forward(
    params: Params, tokens: Array, *, config: ModelConfig, taps: tuple[int, ...]
) -> tuple[tuple[Array, ...], Array]:
    """The taps `[B, T, D]` bfloat16 of padded texts `[B, T]`, and the likeliest tokens `[B, T]`."""
    model, (batch, width) = llama(config), tokens.shape
    cache = cache_lib.init_cache(
        model.cache_spec, batch, width, page_size=_PAGE_SIZE, dtype=params.embed.dtype
    )
    out = model.forward(params, tokens, cache_lib.open_block(cache, width))
    found = tuple(out.hidden[tap].astype(jnp.bfloat16) for tap in taps)
    chunk = math.gcd(batch * width, _LOGITS_TOKENS)
    final = out.hidden[-1].reshape(-1, 1, chunk, config.hidden_size)
    likeliest = jax.lax.map(lambda x: argmax(unembed(params, x)), final)
    return found, likeliest.reshape(batch, width)


def read_states(path: Path) -> StateShard:
    """The shard in `path`, mapped into memory. JspecError naming the file unless it is whole."""
    arrays = tensors.open_file(path)
    try:
        shard = StateShard(
            *(arrays[name] for name in ("tokens", "ends", "prompts", "best")),
            hidden={
                int(name.removeprefix("hidden.")): values
                for name, values in arrays.items()
                if name.startswith("hidden.")
            },
        )
    except (KeyError, ValueError) as error:
        raise JspecError(f"{path}: not a shard of states ({error}); make it again") from None
    total = int(shard.ends[-1]) if shard.ends.size else 0
    sizes = [shard.tokens.shape[0], shard.best.shape[0], *map(len, shard.hidden.values())]
    if sizes != [total] * len(sizes) or len(shard.ends) != len(shard.prompts):
        raise JspecError(f"{path}: its arrays do not fit one another; make it again")
    return shard
