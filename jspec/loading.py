"""From what a user names to what the engine runs: targets and tokenizers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jspec.cache import CacheSpec
from jspec.errors import JspecError
from jspec.model import Model, Output, llama

DTYPES = ("bfloat16", "float16", "float32")
VOCABULARY_PADDING = 512
"""Checkpoints of one family round the same vocabulary up to different multiples (Qwen2.5:
151936 and 152064); sizes less than this apart are the same vocabulary, padded."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What every load shares."""

    dtype: str
    mesh: Mesh | None = None
    progress: Callable[[str, int, int], None] | None = None
    report: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise JspecError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")


class Loaded(NamedTuple):
    """A model ready to run."""

    model: Model
    params: Any
    tokenizer: Any
    source: str | None = None
    """What it was loaded by, if that was a name or a path."""


def load_target(source: Any, params: Any, options: Options) -> Loaded:
    """A checkpoint by name or path, a `Model` with its `params`, or an NNX module."""
    if isinstance(source, Model):
        if params is None:
            raise JspecError("LLM(model=jspec.Model(...)) needs params= as well")
        return Loaded(source, params, None)
    if not isinstance(source, (str, Path)):
        return Loaded(*from_nnx(source), None)
    import checkpoints

    loaded = checkpoints.load(
        source,
        dtype=options.dtype,
        mesh=options.mesh,
        progress=options.progress,
        report=options.report,
    )
    return Loaded(llama(loaded.config), loaded.params, loaded.tokenizer, str(source))


def load_draft(source: str | Path, options: Options) -> tuple[Model, Any]:
    """A second model, which speaks the target's tokens and needs no tokenizer."""
    import checkpoints

    config, params = checkpoints.load_weights(
        source,
        dtype=options.dtype,
        mesh=options.mesh,
        progress=options.progress,
        report=options.report,
    )
    return llama(config), params


def check_vocabularies(draft: int, target: int) -> None:
    """Raises where the sizes differ by more than padding."""
    if abs(draft - target) >= VOCABULARY_PADDING:
        raise JspecError(
            f"the draft model has another vocabulary ({draft} tokens) than the target "
            f"({target}): both must come from one family"
        )


def from_nnx(module: Any) -> tuple[Model, Any]:
    """The `Model` and parameters of a Flax NNX module.

    The module's `__call__(tokens, cache)` follows `Model.forward`; its attributes `vocab_size`,
    `max_position_embeddings`, `num_layers`, `num_kv_heads`, `head_dim` and, if it has any,
    `eos_token_ids` describe it.
    """
    from flax import nnx

    if not isinstance(module, nnx.Module):
        kind = type(module).__name__
        raise JspecError(
            f"model of type {kind}: need a name, a path, a jspec.Model or an nnx.Module"
        )
    needed = ("vocab_size", "max_position_embeddings", "num_layers", "num_kv_heads", "head_dim")
    missing = [name for name in needed if not hasattr(module, name)]
    if missing:
        raise JspecError(f"{type(module).__name__} lacks the attribute {missing[0]!r}")
    graph, params = nnx.split(module)

    def forward(params: Any, tokens: Any, cache: Any) -> Output:
        return Output(*nnx.merge(graph, params)(tokens, cache))

    vocab_size, positions, *spec = (getattr(module, name) for name in needed)
    eos = tuple(getattr(module, "eos_token_ids", ()))
    return Model(forward, vocab_size, positions, CacheSpec(*spec), eos), params


class _WholeText:
    """A detokenizer for tokenizers that only know `decode`: what is new since the last push."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode, self._ids, self._text = decode, [], ""

    def push(self, ids: Sequence[int]) -> str:
        self._ids += ids
        text = self._decode(self._ids)
        new, self._text = text[len(self._text) :], text
        return new

    def flush(self) -> str:
        return ""


def decoder(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """`decode(ids)` of any tokenizer or none, told about special tokens if it wants to know."""
    if tokenizer is None:
        return lambda ids: ""
    if "skip_special_tokens" in inspect.signature(tokenizer.decode).parameters:
        return functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
    return tokenizer.decode


def detokenizer(tokenizer: Any, skip_special_tokens: bool) -> Any:
    """Something with `push(ids) -> new text` and `flush()`, for any tokenizer or none."""
    import checkpoints

    if isinstance(tokenizer, checkpoints.Tokenizer):
        return checkpoints.Detokenizer(tokenizer, skip_special_tokens)
    return _WholeText(decoder(tokenizer, skip_special_tokens))


def encode_plainly(tokenizer: Any, text: str) -> list[int]:
    """The ids of `text` alone, without the special tokens that begin or end a prompt."""
    if "add_special_tokens" in inspect.signature(tokenizer.encode).parameters:
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(tokenizer.encode(text))


def encode_bad_words(
    tokenizer: Any, words: Sequence[str], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """The token sequences that would write each word, at the start of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        ways = [tuple(encode_plainly(tokenizer, text)) for text in (bare, " " + bare)]
        known = [ids for ids in ways if ids and all(0 <= t < vocab_size for t in ids)]
        if not known:
            raise JspecError(f"bad_words: {word!r} cannot be written with the model's tokens")
        found |= dict.fromkeys(known)
    return tuple(found)
