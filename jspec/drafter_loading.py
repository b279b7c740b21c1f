"""From what a user names to the drafter that the engine runs, and its parameters.

A name that is in the table at the end is a drafter of ours; anything else is the path or name of a
trained head or of a model. What stands in `name(parts, option=value)` is `drafter_names`' business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jspec.config import DEFAULT_MODEL, ModelConfig
from jspec.drafter_names import Call, parse
from jspec.drafters.adaptive import Adaptive
from jspec.drafters.base import Drafter
from jspec.drafters.cascade import Cascade
from jspec.drafters.draft_model import DraftModel, fitted
from jspec.drafters.early_exit import EarlyExit
from jspec.drafters.first_of import FirstOf
from jspec.drafters.growth import DynamicTree, StaticTree, TreeShape
from jspec.drafters.head import HeadDrafter
from jspec.drafters.head_verifier import HeadVerifier
from jspec.drafters.lookahead import LookaheadDrafter
from jspec.drafters.lossy_sprinter import LossySprinter
from jspec.drafters.medusa import MedusaDrafter
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.none import NoDrafter
from jspec.drafters.recycling import RecyclingDrafter, recycling_tree
from jspec.drafters.suffix import SuffixDrafter
from jspec.drafters.verifiers import ModelVerifier, Verifier, exit_verifier
from jspec.errors import JspecError
from jspec.exits import ExitParams, exit_of, own_exit
from jspec.head_params import ExitsConfig, ExitsParams, HeadConfig
from jspec.loading import Loaded, Options, check_vocabularies, load_draft
from jspec.quantised import quantise

if TYPE_CHECKING:
    from checkpoints import LoadedHead

DEFAULT_EXITS = f"{DEFAULT_MODEL}-exits"
OWN_EXITS = "own"
Found = tuple[Drafter, Any]
"""A drafter and its parameters."""


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


_BEST_HEAD = f"{DEFAULT_MODEL}-mtp"
_BEST_DRAFTER = f"ngram:2,{_BEST_HEAD}"
_BEST_DRAFTING = Drafting(tree=DynamicTree(depth=3, width=3, num_nodes=6))
"""What did best for the default model (bench/README.md)."""


def suited[Named](
    drafter: Named, drafting: Drafting, source: str | None
) -> tuple[Named | str, Drafting]:
    """What "auto" means for the model that was loaded by `source`, unless it says how much to
    draft; any other drafter as it is."""
    if str(drafter) != "auto":
        return drafter, drafting
    if not _is_default(source):
        return "ngram", drafting
    return _BEST_DRAFTER, _BEST_DRAFTING if drafting == Drafting() else drafting


class Loading(NamedTuple):
    """What a drafter is loaded for."""

    target: Loaded
    drafting: Drafting
    options: Options
    known_exits: dict[str, dict[int, ExitParams]]
    """By where they come from: exits of one file share an output head."""

    def config(self, drafter: str) -> ModelConfig:
        """The target's, for a drafter that runs its layers or reads what they say."""
        if self.target.model.config is None:
            raise JspecError(
                f"drafter {drafter!r} is for models of the Llama family: this target has no layers "
                "or hidden states that it could read"
            )
        return self.target.model.config


def _is_default(source: str | None) -> bool:
    import checkpoints

    return source is not None and checkpoints.is_default(source)


def shipped_head(target: Loaded) -> str | None:
    """The best head that comes with jspec for a model."""
    return _BEST_HEAD if _is_default(target.source) else None


def load_drafter(
    drafter: str | Path | Drafter, params: Any, target: Loaded, drafting: Drafting, options: Options
) -> Found:
    """The drafter that a name, a head, a model source or an object stands for, and its
    parameters. Several, joined by commas, are in order of preference."""
    if not isinstance(drafter, (str, Path)):
        return drafter, params
    text = str(drafter)
    sources = (text,) if Path(drafter).expanduser().exists() else parse(text)
    if drafting.tree is not None and not any(_is_head(source) for source in sources):
        raise JspecError(f"drafter {text!r} drafts chains: a tree needs a trained head")
    loading = Loading(target, drafting, options, {})
    found = [_load(source, loading) for source in sources]
    if len(found) == 1:
        return found[0]
    for each, _ in found:
        _refuse_lossy(each, text)
    return FirstOf(tuple(d for d, _ in found)), tuple(p for _, p in found)


def _refuse_lossy(part: Drafter, whole: str) -> None:
    if isinstance(part, LossySprinter):
        raise JspecError(
            f"drafter {whole}: {part.name} is lossy, which others are not: use it alone"
        )


def _load(source: str | Call, loading: Loading) -> Found:
    call = as_call(source)
    if call is None:
        return _load_file(str(source), loading)
    K, call = call.take("k")
    if K is not None:
        drafting = Drafting(num_speculative_tokens=_number(call, "k", K))
        loading = loading._replace(drafting=drafting)
    return _BUILDERS[call.name](call, loading)


def as_call(source: str | Call) -> Call | None:
    """The drafter of ours that is meant, as a call; None: it is a path or a model's name."""
    if isinstance(source, Call):
        if source.name not in _BUILDERS:
            known = ", ".join(sorted(_BUILDERS))
            raise JspecError(f"drafter {source.name}(...) is not known; there are {known}")
        return source
    name, colon, argument = source.partition(":")
    if name not in _BUILDERS:
        return None
    return Call(name, (argument,) if colon else ())


def _is_head(source: str | Call) -> bool:
    import checkpoints

    call = as_call(source)
    return call.name in _HEAD_FAMILIES if call else checkpoints.is_head(str(source))


def _none(call: Call, loading: Loading) -> Found:
    call.expect(0)
    return NoDrafter(), ()


_LOOKUPS = {"ngram": NgramDrafter, "suffix": SuffixDrafter}


def _lookup(call: Call, loading: Loading) -> Found:
    """`ngram`, `suffix:MATCH`: the shortest match worth following."""
    call.expect(0, 1)
    drafting, drafter = loading.drafting, _LOOKUPS[call.name]
    K = drafting.nodes_or(drafting.tokens_or(drafter.num_speculative_tokens))
    least = _number(call, "MATCH", call.parts[0]) if call.parts else drafter.min_match
    return drafter(K, least), ()


def _recycling(call: Call, loading: Loading) -> Found:
    """`recycling:NODES`: of the tree."""
    call.expect(0, 1)
    drafting, default = loading.drafting, recycling_tree()
    nodes = drafting.nodes_or(default.num_nodes)
    if call.parts:
        nodes = _number(call, "NODES", call.parts[0])
    tree = recycling_tree(drafting.tokens_or(default.depth), nodes)
    return RecyclingDrafter(loading.target.model.vocab_size, tree), ()


def _lookahead(call: Call, loading: Loading) -> Found:
    """`lookahead(window=W, ngram=N, candidates=G)`."""
    sizes = {}
    for name in ("window", "ngram", "candidates"):
        value, call = call.take(name)
        if value is not None:
            sizes[name] = _number(call, name, value)
    call.expect(0)
    K = loading.drafting.num_speculative_tokens
    if K is not None:
        sizes.setdefault("window", K + 2 - sizes.get("ngram", LookaheadDrafter.ngram))
    return LookaheadDrafter(loading.target.model.vocab_size, **sizes), ()


def _early_exit(call: Call, loading: Loading) -> Found:
    stop, call = call.take("stop")
    layer, exit = _exit(call, loading)
    name = f"early_exit:{layer}" if stop is None else f"early_exit({layer}, stop={stop})"
    drafter = EarlyExit(
        loading.config(call.name),
        layer,
        loading.drafting.tokens_or(EarlyExit.num_speculative_tokens),
        EarlyExit.stop if stop is None else _probability(call, "stop", stop),
        name=name,
    )
    return drafter, (loading.target.params, exit)


def _lossy_sprinter(call: Call, loading: Loading) -> Found:
    threshold, call = _threshold(call, LossySprinter.stop)
    layer, exit = _exit(call, loading)
    drafter = LossySprinter(
        loading.config(call.name),
        layer,
        loading.drafting.tokens_or(LossySprinter.num_speculative_tokens),
        threshold,
        name=f"lossy_sprinter({layer}, threshold={threshold})",
    )
    return drafter, (loading.target.params, exit)


def _adaptive(call: Call, loading: Loading) -> Found:
    threshold, call = _threshold(call, Adaptive.stop)
    if len(call.parts) < 2:
        raise JspecError("adaptive: write adaptive(LAYER, LAYER, ..., threshold=0.6)")
    found = [_exit(dataclasses.replace(call, parts=(part,)), loading) for part in call.parts]
    layers, exits = zip(*found, strict=True)
    drafter = Adaptive(
        loading.config(call.name),
        layers[0],
        loading.drafting.tokens_or(Adaptive.num_speculative_tokens),
        threshold,
        name=f"adaptive({', '.join(map(str, layers))}, threshold={threshold})",
        deeper=layers[1:],
    )
    return drafter, (loading.target.params, exits)


def _threshold(call: Call, default: float) -> tuple[float, Call]:
    value, call = call.take("threshold")
    return default if value is None else _probability(call, "threshold", value), call


def _exit(call: Call, loading: Loading) -> tuple[int, ExitParams]:
    """Layers below the exit that `early_exit(LAYER, exits=...)` names, and its parameters."""
    source, call = call.take("exits")
    call.expect(1)
    layer = _number(call, "LAYER", call.parts[0])
    exits = exits_of(source, loading)
    if layer not in exits and source is not None:
        there = ", ".join(map(str, exits))
        raise JspecError(f"early_exit({layer}, exits={source}): there are exits at {there} only")
    return layer, exits[layer] if layer in exits else own_exit(loading.target.params)


def exits_of(source: str | None, loading: Loading) -> dict[int, ExitParams]:
    """Layers below each exit of a file of trained ones; "own": the model's final norm and output
    head behind any layer. None: those that come with jspec for the model, else its own."""
    num_layers, target = loading.config("early_exit").num_hidden_layers, loading.target
    if source is None:
        source = DEFAULT_EXITS if _is_default(target.source) else OWN_EXITS
    if source == OWN_EXITS:
        return dict.fromkeys(range(1, num_layers), own_exit(target.params))
    if source not in loading.known_exits:
        config, trained = _read_head(source, loading)
        if not isinstance(config, ExitsConfig) or not isinstance(trained, ExitsParams):
            raise JspecError(f"exits={source}: it is a head, not exits")
        found = {layer: exit_of(config, trained, layer) for layer in config.layers}
        loading.known_exits[source] = found
    return loading.known_exits[source]


def _cascade(call: Call, loading: Loading) -> Found:
    window, call = call.take("window")
    lenience, call = call.take("lenience")
    if len(call.parts) != 2:
        raise JspecError("cascade: write cascade(DRAFTER, VERIFIER, window=4, lenience=1)")
    call.expect(2)
    drafter, drafter_params = _load(call.parts[0], loading)
    _refuse_lossy(drafter, call.name)
    verifier, verifier_params = _verifier(call.parts[1], loading)
    below, above = _num_shared(drafter), verifier.num_shared
    if below >= above > 0:
        raise JspecError(
            f"cascade: early_exit:{above} cannot check what early_exit:{below} drafts: it must be "
            "a later exit"
        )
    size = Cascade.window if window is None else _number(call, "window", window)
    leans = Cascade.lenience if lenience is None else _probability(call, "lenience", lenience)
    lenient = "" if leans == 1 else f", lenience={leans}"
    name = f"cascade({drafter.name}, {verifier.name}, window={size}{lenient})"
    return Cascade(drafter, verifier, size, leans, name=name), (drafter_params, verifier_params)


def _num_shared(part: Drafter) -> int:
    """Layers of the target that the drafter of a cascade runs."""
    if isinstance(part, Cascade):
        return part.verifier.num_shared
    return part.num_shared if isinstance(part, EarlyExit) else 0


def _verifier(source: str | Call, loading: Loading) -> tuple[Verifier, Any]:
    """What accepts inside a cascade."""
    call = as_call(source)
    if call is not None and call.name == "early_exit":
        layer, exit = _exit(call, loading)
        return exit_verifier(loading.config(call.name), layer), (loading.target.params, exit)
    if _is_head(source):
        head, params = _load(source, loading._replace(drafting=Drafting()))
        if not isinstance(head, HeadDrafter):
            raise JspecError(f"cascade: {head.name} does not verify: it has no law of its own")
        return HeadVerifier(head.config, name=head.name), params
    if call is not None:
        raise JspecError(f"cascade: {call.name} does not verify: give an exit, a head or a model")
    path, vocab_size = str(source), loading.target.model.vocab_size
    model, params = load_draft(path, loading.options)
    check_vocabularies(model.vocab_size, vocab_size)
    return ModelVerifier(fitted(model, vocab_size), name=Path(path).name), params


def _load_file(source: str, loading: Loading) -> Found:
    """A head or a model."""
    import checkpoints

    if checkpoints.is_head(source):
        return _load_head(source, loading)
    try:
        model, params = load_draft(source, loading.options)
    except JspecError as error:
        raise JspecError(
            f"drafter {source!r} is none of {', '.join(sorted(_BUILDERS))} nor a draft head, "
            f"and as a draft model: {error}"
        ) from error
    vocab_size = loading.target.model.vocab_size
    check_vocabularies(model.vocab_size, vocab_size)
    K = loading.drafting.tokens_or(DraftModel.num_speculative_tokens)
    return DraftModel(model, vocab_size, K, name=Path(source).name), params


_BITS = {"int8": 8, "int4": 4}
_QUANTISED_TOKENS = 2
"""K of a target that drafts for itself: a step costs most of a pass, so long drafts do not pay."""


def _quantised(call: Call, loading: Loading) -> Found:
    """The target itself in fewer bits, as a draft model."""
    call.expect(0)
    loading.config(call.name)
    model, params = loading.target.model, loading.target.params
    K = loading.drafting.tokens_or(_QUANTISED_TOKENS)
    drafter = DraftModel(model, model.vocab_size, K, name=call.name)
    return drafter, quantise(params, _BITS[call.name])


_HEAD_FAMILIES = ("eagle", "eagle3", "medusa", "mtp")
_MEDUSA_ACCURACIES = (0.5, 0.13, 0.07, 0.04, 0.03)
"""Of the ranks of a head's tokens, for the shape of Medusa's tree, where none is given."""
_MEDUSA_NODES = 16


def _head(call: Call, loading: Loading) -> Found:
    """`mtp:PATH`: a head that has to be of that family."""
    call.expect(1)
    source = str(call.parts[0])
    drafter, params = _load_head(source, loading)
    family = drafter.config.family if isinstance(drafter, HeadDrafter) else "medusa"
    if family != call.name:
        raise JspecError(f"drafter {call.name}:{source}: this head is of the family {family}")
    return drafter, params


def _read_head(source: str, loading: Loading) -> LoadedHead:
    import checkpoints

    return checkpoints.load_head(
        source,
        target_config=loading.config(source),
        target_params=loading.target.params,
        dtype=loading.options.dtype,
        mesh=loading.options.mesh,
    )


def _load_head(source: str, loading: Loading) -> Found:
    (config, params), drafting = _read_head(source, loading), loading.drafting
    name = Path(source).name
    if isinstance(config, HeadConfig):
        K = drafting.tokens_or(HeadDrafter.num_speculative_tokens)
        return HeadDrafter(config, K, drafting.tree, name=name), params
    if isinstance(config, ExitsConfig):
        layers = ", ".join(map(str, config.layers))
        raise JspecError(
            f"drafter {source!r} is exits at layers {layers}: say which is meant, as "
            f"early_exit({config.layers[0]}, exits={source})"
        )
    depth = min(drafting.tokens_or(config.num_heads), config.num_heads)
    tree = drafting.tree or StaticTree.likeliest([_MEDUSA_ACCURACIES] * depth, _MEDUSA_NODES)
    if tree.depth > config.num_heads:
        raise JspecError(f"a tree of depth {tree.depth}: {source} has {config.num_heads} heads")
    return MedusaDrafter(config, tree, name=name), params


def _number(call: Call, name: str, value: Any) -> int:
    if not (isinstance(value, str) and value.isdecimal()):
        raise JspecError(f"drafter {call.name}: {name}={value}: give a whole number")
    return int(value)


def _probability(call: Call, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise JspecError(f"drafter {call.name}: {name}={value}: give a probability, from 0 to 1")
    return number


_BUILDERS: dict[str, Callable[[Call, Loading], Found]] = {
    "none": _none,
    **dict.fromkeys(_LOOKUPS, _lookup),
    "recycling": _recycling,
    "lookahead": _lookahead,
    "early_exit": _early_exit,
    "adaptive": _adaptive,
    "lossy_sprinter": _lossy_sprinter,
    "cascade": _cascade,
    **dict.fromkeys(_BITS, _quantised),
    **dict.fromkeys(_HEAD_FAMILIES, _head),
}
