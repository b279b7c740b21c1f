"""From what a user names to what the engine runs: targets, drafters, tokenizers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jspec.cache import CacheSpec
from jspec.drafters.base import Drafter
from jspec.drafters.draft_model import DraftModel
from jspec.drafters.first_of import FirstOf
from jspec.drafters.growth import DynamicTree, StaticTree, TreeShape
from jspec.drafters.head import HeadDrafter
from jspec.drafters.medusa import MedusaDrafter
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.none import NoDrafter
from jspec.errors import JspecError
from jspec.head_params import HeadConfig
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
    return Loaded(llama(loaded.config), loaded.params, loaded.tokenizer)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How much to draft; None leaves it to the drafter."""

    num_speculative_tokens: int | None = None
    """K: a chain's length, a tree's depth."""
    tree: TreeShape | None = None
    """Of drafters that can grow one."""

    def __post_init__(self) -> None:
        K, tree = self.num_speculative_tokens, self.tree
        if K is not None and K < 1:
            raise JspecError(
                f'num_speculative_tokens={K}: must be at least 1 (drafter="none" decodes plainly)'
            )
        if tree is not None and K is not None and tree.depth != K:
            raise JspecError(f"a tree of depth {tree.depth} with num_speculative_tokens={K}")

    def tokens_or(self, default: int) -> int:
        """K, if it was not given, `default`."""
        if self.tree is not None:
            return self.tree.depth
        return default if self.num_speculative_tokens is None else self.num_speculative_tokens

    def nodes_or(self, default: int) -> int:
        """P, if nothing was given, `default`: how long a chain may be that costs no more."""
        return default if self.tree is None else self.tree.num_nodes


def dynamic_tree(depth: int | None, width: int, num_nodes: int | None) -> DynamicTree | None:
    """The tree that command lines ask for; None: they ask for chains."""
    if num_nodes is None:
        return None
    return DynamicTree(depth or HeadDrafter.num_speculative_tokens, width, num_nodes)


_BEST_DRAFTER = "ngram:2,smollm2-135m-instruct-mtp"
_BEST_DRAFTING = Drafting(tree=DynamicTree(depth=3, width=3, num_nodes=6))
"""What did best for the default model (bench/README.md)."""


def suited[Named](drafter: Named, drafting: Drafting, model: Any) -> tuple[Named | str, Drafting]:
    """What "auto" means for the model that `model` names, unless it says how much to draft; any
    other drafter as it is."""
    if str(drafter) != "auto":
        return drafter, drafting
    import checkpoints

    if not isinstance(model, (str, Path)) or not checkpoints.is_default(model):
        return "ngram", drafting
    return _BEST_DRAFTER, _BEST_DRAFTING if drafting == Drafting() else drafting


def load_drafter(
    drafter: str | Path | Drafter, params: Any, target: Loaded, drafting: Drafting, options: Options
) -> tuple[Drafter, Any]:
    """The drafter that a name, a head, a model source or an object stands for, and its
    parameters. Several, joined by commas, are in order of preference."""
    if not isinstance(drafter, (str, Path)):
        return drafter, params
    import checkpoints

    sources = [drafter] if Path(drafter).exists() else str(drafter).split(",")
    if drafting.tree is not None and not any(map(checkpoints.is_head, sources)):
        raise JspecError(f"drafter {str(drafter)!r} drafts chains: a tree needs a trained head")
    loaded = [_load_one(source, target, drafting, options) for source in sources]
    if len(loaded) == 1:
        return loaded[0]
    return FirstOf(tuple(d for d, _ in loaded)), tuple(p for _, p in loaded)


def _load_one(
    source: str | Path, target: Loaded, drafting: Drafting, options: Options
) -> tuple[Drafter, Any]:
    import checkpoints

    if str(source) == "none":
        return NoDrafter(), ()
    if match := re.fullmatch(r"ngram(?::(\d+))?", str(source)):
        K = drafting.nodes_or(drafting.tokens_or(NgramDrafter.num_speculative_tokens))
        return NgramDrafter(K, int(match[1] or NgramDrafter.min_match)), ()
    if checkpoints.is_head(source):
        return _load_head(source, target, drafting, options)
    try:
        draft = load_target(source, None, options)
    except JspecError as error:
        raise JspecError(
            f'drafter {str(source)!r} is neither "none" nor "ngram" nor a draft head, '
            f"and as a draft model: {error}"
        ) from error
    vocab_size = target.model.vocab_size
    check_vocabularies(draft.model.vocab_size, vocab_size)
    K = drafting.tokens_or(DraftModel.num_speculative_tokens)
    return DraftModel(draft.model, vocab_size, K, name=Path(source).name), draft.params


_MEDUSA_ACCURACIES = (0.5, 0.13, 0.07, 0.04, 0.03)
"""Of the ranks of a head's tokens, for the shape of Medusa's tree, where none is given."""
_MEDUSA_NODES = 16


def _load_head(
    source: str | Path, target: Loaded, drafting: Drafting, options: Options
) -> tuple[Drafter, Any]:
    import checkpoints

    if target.model.config is None:
        raise JspecError(
            f"drafter {str(source)!r} is a head on a model of the Llama family: this target has "
            "no hidden states that it could read"
        )
    config, params = checkpoints.load_head(
        source,
        target_config=target.model.config,
        target_params=target.params,
        dtype=options.dtype,
        mesh=options.mesh,
    )
    name = Path(source).name
    if isinstance(config, HeadConfig):
        K = drafting.tokens_or(HeadDrafter.num_speculative_tokens)
        return HeadDrafter(config, K, drafting.tree, name=name), params
    depth = min(drafting.tokens_or(config.num_heads), config.num_heads)
    tree = drafting.tree or StaticTree.likeliest([_MEDUSA_ACCURACIES] * depth, _MEDUSA_NODES)
    if tree.depth > config.num_heads:
        raise JspecError(f"a tree of depth {tree.depth}: {source} has {config.num_heads} heads")
    return MedusaDrafter(config, tree, name=name), params


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
