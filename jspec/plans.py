"""Which exits should draft and check: plans of self-speculation, judged before they run.

A plan is judged by two things that are measured once: what every exit says along the target's own
greedy text (`Sight`), and what the parts of a round take (`Costs`). From these a greedy generation
is replayed on the host for any plan: the same rounds, windows and rejections as the engine's, but
for what is drafted behind a first wrong token, where the exits are taken to agree with one another
as often as on the text itself. Knows nothing of devices.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jspec.errors import JspecError

NGRAMS = 0
"""Stands for n-grams among the layers of a plan."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Early exits above one another, the target above them all."""

    layers: tuple[int, ...]
    """Layers below each exit, ascending: the first drafts, the others check (`Cascade`)."""
    num_drafts: int
    """K of the first."""
    window: int = 4
    lenience: float = 1.0
    """Of those that check."""

    @property
    def drafter(self) -> str:
        """What `LLM(drafter=)` calls it."""
        name = f"early_exit({self.layers[0]}, k={self.num_drafts})"
        if self.layers[0] == NGRAMS:
            name = f"ngram(k={self.num_drafts})"
        lenient = "" if self.lenience == 1 else f", lenience={self.lenience}"
        for layer in self.layers[1:]:
            name = f"cascade({name}, early_exit:{layer}, window={self.window}{lenient})"
        return name


class Sight(NamedTuple):
    """What is said at each of N places of a text that the target wrote."""

    best: np.ndarray
    """`[N]`: the token that is there, the target's."""
    said: Mapping[int, np.ndarray]
    """Layers below an exit -> `[N]`: the exit's likeliest token."""
    ngrams: Sequence[Sequence[int]]
    """N proposals of the n-gram drafter, the longest that it made of the text before."""
    gaps: Mapping[int, Sequence[Mapping[int, float]]]
    """Layers below an exit -> N times: tokens that n-grams or exits say at this place, and how far
    the exit's logit of each is below its best."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round; passes over other widths lie between those of `widths`."""

    widths: tuple[int, ...]
    layer: tuple[float, ...]
    """One layer of the target, at each width."""
    head: tuple[float, ...]
    """Final norm and output head, and all that a round does once."""
    exit: tuple[float, ...]
    """What an exit takes to speak, and to be drawn from."""
    ngrams: float
    """A proposal of n-grams."""
    num_layers: int
    narrow: int | None = None
    """Tokens of the narrow block, where a check runs at if its drafts fit (`decode.DecodeConfig`);
    None: all run at the widest."""

    def at(self, part: str, width: int) -> float:
        return _between(self.widths, getattr(self, part), width)

    def plain(self) -> float:
        """A token of plain decoding."""
        return self.num_layers * self.at("layer", 1) + self.at("head", 1)


@functools.lru_cache(maxsize=1024)  # asked a million times, of few widths
def _between(widths: tuple[int, ...], seconds: tuple[float, ...], width: int) -> float:
    return float(np.interp(width, widths, seconds))


class Forecast(NamedTuple):
    """What a plan promises."""

    plan: Plan
    speedup: float
    """Over plain decoding."""
    length: float
    """Tokens a round of the target's."""
    drafted: float
    """Tokens that the target checks a round."""
    seconds: float
    """Of a round."""
    drafting_share: float
    """Of these, what is spent before the target's pass."""


class _Proposal(NamedTuple):
    tokens: list[int]
    seconds: float
    width: int
    """Tokens, with the last committed one, that have been through `layers` of the target."""
    layers: int


def replay(plan: Plan, texts: Sequence[Sight], costs: Costs) -> Forecast:
    """Decodes all texts by the plan. Greedy rule; rows of one."""
    tokens = rounds = drafted = 0
    seconds = drafting = 0.0
    for text in texts:
        place, end = 0, len(text.best)
        while place < end:
            proposal = _propose(plan, len(plan.layers) - 1, text, place, costs)
            accepted = _agreeing(proposal.tokens, text.best[place:])
            rest = costs.num_layers - proposal.layers
            size = _width(plan, len(plan.layers) - 1)
            if costs.narrow is not None and len(proposal.tokens) < costs.narrow:
                size = costs.narrow
            drafting += proposal.seconds
            seconds += proposal.seconds + rest * costs.at("layer", size) + costs.at("head", size)
            tokens += min(accepted + 1, end - place)
            place += accepted + 1
            rounds += 1
            drafted += len(proposal.tokens)
    if not rounds:
        raise JspecError("no text to calibrate on: give prompts that the model answers")
    return Forecast(
        plan=plan,
        speedup=costs.plain() * tokens / seconds,
        length=tokens / rounds,
        drafted=drafted / rounds,
        seconds=seconds / rounds,
        drafting_share=drafting / seconds,
    )


def _width(plan: Plan, level: int) -> int:
    """Tokens of the block that checks what `level` drafts."""
    return plan.num_drafts + 1 + level * plan.window


def _propose(plan: Plan, level: int, text: Sight, place: int, costs: Costs) -> _Proposal:
    """What the first `level` + 1 exits draft from `place` on, and what it takes."""
    layer, K = plan.layers[level], plan.num_drafts
    if level == 0 and layer == NGRAMS:
        known = text.ngrams[place] if place < len(text.ngrams) else ()
        return _Proposal(list(known[:K]), costs.ngrams, K + 1, 0)
    said = text.said[layer]
    if level == 0:
        step = layer * costs.at("layer", 1) + costs.at("exit", 1)
        return _Proposal(said[place : place + K].tolist(), (K + 1) * step, K + 1, layer)
    tokens: list[int] = []
    seconds, size = 0.0, _width(plan, level - 1)
    while len(tokens) < plan.window and place + len(tokens) < len(said):
        here = place + len(tokens)
        below = _propose(plan, level - 1, text, here, costs)
        accepted = _standing(below.tokens, text.gaps[layer][here:], plan.lenience)
        tokens += below.tokens[:accepted]
        tokens += said[here + accepted : here + accepted + 1].tolist()
        rest = layer - below.layers
        seconds += below.seconds + rest * costs.at("layer", size) + costs.at("exit", size)
    seconds += layer * costs.at("layer", 1)  # the last of them, which no round has read
    return _Proposal(tokens, seconds, _width(plan, level), layer)


def _agreeing(drafts: Sequence[int], wanted: np.ndarray) -> int:
    """How many of the drafts are right before the first that is not."""
    for i, (draft, token) in enumerate(zip(drafts, wanted, strict=False)):
        if draft != token:
            return i
    return min(len(drafts), len(wanted))


def _standing(drafts: Sequence[int], gaps: Sequence[Mapping[int, float]], lenience: float) -> int:
    """How many of the drafts a verifier lets through before the first that it does not."""
    most = -math.log(lenience)
    for i, (draft, gap) in enumerate(zip(drafts, gaps, strict=False)):
        if gap.get(draft, math.inf) > most:
            return i
    return min(len(drafts), len(gaps))


def candidates(
    exits: Iterable[int], levels: int, *, drafts: Sequence[int] = (1, 2, 4), ngrams: bool = False
) -> list[Plan]:
    """All plans of so many exits, of n-grams and one exit less if `ngrams`; windows of 1 to 4."""
    exits = sorted(exits)
    rows = itertools.combinations(exits, levels - ngrams)
    windows = (1, 2, 4) if levels > 1 else (Plan.window,)
    leniences = (1.0, 0.1, 0.001) if levels > 1 else (Plan.lenience,)
    return [
        Plan(((NGRAMS,) if ngrams else ()) + row, *settings)
        for row in rows
        for settings in itertools.product(drafts, windows, leniences)
    ]


def ranked(plans: Iterable[Plan], texts: Sequence[Sight], costs: Costs) -> list[Forecast]:
    """The fastest first; of equal ones that with fewer layers and drafts."""
    found = [replay(plan, texts, costs) for plan in plans]
    return sorted(found, key=lambda f: (-f.speedup, f.plan.layers, f.plan.num_drafts))


def agreement(texts: Sequence[Sight]) -> dict[int, float]:
    """Share of places where each exit says what the target says."""
    total = sum(len(text.best) for text in texts)
    layers = sorted(texts[0].said) if texts else []
    return {
        layer: sum(int(np.sum(text.said[layer] == text.best)) for text in texts) / total
        for layer in layers
    }
