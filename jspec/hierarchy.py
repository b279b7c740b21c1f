"""Self-speculation side by side, over batch sizes: the table of HiSpec (arXiv 2510.01336).

What is compared is chosen by `calibrate` and `plans` on the first prompts; then every batch is
decoded by plain decoding and by each method in turn. A lossy method is named so in every line, and
how much of its text is the target's own is measured.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jspec import benchmark, cost_model, plans
from jspec.accuracy import greedy_share
from jspec.benchmark import PLAIN, Progress, Prompt
from jspec.calibrate import Calibration, calibrate
from jspec.drafter_loading import shipped_head
from jspec.engine.requests import RequestOutput, SamplingParams
from jspec.errors import JspecError
from jspec.llm import LLM, enable_compilation_cache
from jspec.metrics import Metrics
from jspec.plans import Costs, Forecast, Sight

BATCH_SIZES = (1, 2, 4, 8, 16)
SINGLE, HISPEC, BELOW = "early exit", "HiSpec (cascade)", "n-grams, exit"
_KINDS = {SINGLE: (1, False), HISPEC: (2, False), BELOW: (2, True)}
"""Levels of the plans, and whether the first of them is n-grams."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was asked for, as it stands in the JSON."""

    prompts: str
    model: str
    dtype: str = "bfloat16"
    max_tokens: int = 128
    limit: int | None = None
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    num_calibration_prompts: int = 6


@dataclasses.dataclass(frozen=True)
class Method:
    """A line of the table."""

    label: str
    drafter: str
    why: str
    """Why these layers, K and window."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A method at one batch size, against plain decoding at the same."""

    method: str
    batch_size: int
    tokens_per_second: float
    speedup: float
    median_speedup: float
    """Of the single batches."""
    mean_acceptance_length: float
    acceptance_rate: float
    own_share: float
    """Share of its tokens that are the target's greedy choice behind what stands before them."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the cost model says of the best plan of a kind."""

    model: str
    method: str
    drafter: str
    speedup: float
    mean_acceptance_length: float


@dataclasses.dataclass(frozen=True)
class Report:
    """A run of the suite."""

    settings: Settings
    methods: tuple[Method, ...]
    cells: tuple[Cell, ...]
    plain_tokens_per_second: Mapping[int, float]
    resident_bytes: Mapping[str, int]
    """Parameters and decoding state of one row of each method, every array once."""
    agreement: Mapping[int, float]
    """Layers below an exit -> share of places where it says what the target says."""
    predicted: tuple[Prediction, ...]
    """For sizes that were not run."""
    stopped_by: BaseException | None = None
    """What ended the run before the last batch size; the cells are of those before it."""


class _Bench:
    """Engines of one target, and the prompts that they answer."""

    def __init__(self, settings: Settings, prompts: Sequence[Prompt], progress: Progress) -> None:
        enable_compilation_cache()
        self.settings, self.progress = settings, progress
        self.plain = LLM(settings.model, drafter=PLAIN, dtype=settings.dtype, progress=progress)
        chat = [self.plain.chat_prompt([{"role": "user", "content": p.text}]) for p in prompts]
        self.prompts = [list(ids) for ids in chat]
        self.params = SamplingParams(temperature=0.0, max_tokens=settings.max_tokens)

    def engine(self, drafter: str, batch_size: int) -> LLM:
        """An engine that runs batches of one size, with the target's weights."""
        return LLM(
            self.plain,
            drafter=drafter,
            dtype=self.settings.dtype,
            max_num_seqs=batch_size,
            batch_sizes=(batch_size,),
        )

    def batches(self, size: int) -> list[list[list[int]]]:
        """The prompts in batches of `size`, those that do not fill one left out, as many prompts
        as there are of all sizes."""
        most = max(self.settings.batch_sizes)
        whole = self.prompts[: len(self.prompts) // most * most]
        return [whole[i : i + size] for i in range(0, len(whole), size)]


def run(settings: Settings, prompts: Sequence[Prompt], progress: Progress) -> Report:
    """Calibrates on some of the prompts, then times every method at every batch size on all. A stop
    once a size is done ends it early, see `stopped_by`."""
    most = max(settings.batch_sizes)
    if len(prompts) < most:
        raise JspecError(f"{len(prompts)} prompts: a batch of {most} needs as many (--batch-sizes)")
    bench = _Bench(settings, prompts, progress)
    every = max(1, len(prompts) // settings.num_calibration_prompts)
    found = calibrate(bench.plain, bench.prompts[::every], progress=progress)
    methods = choose(found, shipped_head(bench.plain.target))
    done: dict[int, _Size] = {}
    stopped_by = None
    try:
        for size in settings.batch_sizes:
            done[size] = _at_size(bench, methods, size)
    except (KeyboardInterrupt, JspecError) as error:
        if not done:
            raise
        stopped_by = error
    return Report(
        settings=settings,
        methods=tuple(methods),
        cells=tuple(cell for one in done.values() for cell in one.cells),
        plain_tokens_per_second={size: one.plain_speed for size, one in done.items()},
        resident_bytes=next(iter(done.values())).resident_bytes,
        agreement=plans.agreement(found.texts),
        predicted=tuple(predict(found)),
        stopped_by=stopped_by,
    )


class _Size(NamedTuple):
    """What was measured at one batch size."""

    cells: list[Cell]
    plain_speed: float
    resident_bytes: dict[str, int]


def _at_size(bench: _Bench, methods: Sequence[Method], size: int) -> _Size:
    """Every method at one batch size. Its engines and their programs are gone afterwards: a program
    takes tens of memory maps, of which a process has 65,530 on Linux."""
    engines = {PLAIN: bench.engine(PLAIN, size)}
    engines |= {method.label: bench.engine(method.drafter, size) for method in methods}
    runs = _timed(bench, engines, size)
    cells = [_cell(bench, method.label, size, runs) for method in methods]
    resident = {label: llm.resident_bytes() for label, llm in engines.items()}
    del engines
    jax.clear_caches()
    return _Size(cells, _speed(runs[PLAIN]), resident)


def choose(found: Calibration, head: str | None = None) -> list[Method]:
    """The methods, each with the layers, K and window that promise most. `head` is a trained head
    of the target, for a cascade that needs no exit."""
    texts = found.texts
    single, cascade, below = _ranked(texts, found.costs)
    layer, K = single[0].plan.layers[0], single[0].plan.num_drafts
    agreed = plans.agreement(texts)
    sure = f"the exit of the best single plan, which is right at {agreed[layer]:.0%} of the places"
    later = [other for other in found.exits if other > layer][:2]
    ladder = ", ".join(map(str, (layer, *later)))
    methods = [
        Method(SINGLE, single[0].plan.drafter, _why(single)),
        Method(
            "LayerSkip style",
            f"early_exit({layer}, exits=own, k={K})",
            "the same without trained exits: final norm and output head of the model",
        ),
        Method(HISPEC, cascade[0].plan.drafter, _why(cascade)),
        Method(BELOW, below[0].plan.drafter, _why(below)),
        Method("Lookahead", "lookahead", "its defaults"),
        Method("AdaDecode style", f"adaptive({ladder})", f"{sure}, and the next two"),
        Method("SPRINTER (lossy)", f"lossy_sprinter({layer})", sure),
    ]
    if head is not None:
        cascade_of_head = f"cascade(ngram(2, k=2), {head}, window=1, lenience=0.01)"
        methods.insert(4, Method("n-grams, head", cascade_of_head, "the head that comes with it"))
    return methods


def best_plans(found: Calibration) -> dict[str, tuple[Forecast, str]]:
    """The best plan of each kind, and why it is."""
    ranks = zip(_KINDS, _ranked(found.texts, found.costs), strict=True)
    return {label: (ranked[0], _why(ranked)) for label, ranked in ranks}


def predict(found: Calibration) -> list[Prediction]:
    """The same choice for the sizes of the cost model, batch 1."""
    predictions = []
    for size in cost_model.SIZES:
        layers = size.config.num_hidden_layers
        texts = cost_model.stretched(found.texts, found.costs.num_layers, layers)
        costs = cost_model.counted(size)
        for label, (best, *_) in zip(_KINDS, _ranked(texts, costs), strict=True):
            plan = best.plan.drafter
            predictions.append(Prediction(size.name, label, plan, best.speedup, best.length))
    return predictions


def _ranked(texts: Sequence[Sight], costs: Costs) -> list[list[Forecast]]:
    """All plans of each of `_KINDS`, the best first."""
    exits = sorted(texts[0].said)
    return [
        plans.ranked(plans.candidates(exits, levels, ngrams=ngrams), texts, costs)
        for levels, ngrams in _KINDS.values()
    ]


def _why(forecasts: Sequence[Forecast]) -> str:
    """What the first of these promises, and what the next best of other layers would."""
    best = forecasts[0]
    words = (
        f"forecast {best.speedup:.2f}x: {best.length:.2f} tokens a round of which "
        f"{best.drafting_share:.0%} is drafting"
    )
    other = next((f for f in forecasts if f.plan.layers != best.plan.layers), None)
    if other is None:
        return words
    return f"{words}; next layers {other.plan.layers}: {other.speedup:.2f}x"


_Runs = Mapping[str, Sequence[Sequence[RequestOutput]]]
"""System -> what it made of each batch."""


def _timed(bench: _Bench, engines: Mapping[str, LLM], size: int) -> _Runs:
    """Every batch by every engine, in turn, once all is compiled."""
    batches = bench.batches(size)
    longest = [max(map(len, batch)) + bench.settings.max_tokens for batch in batches]
    warm = benchmark.one_per_capacity(longest)
    runs: dict[str, list[list[RequestOutput]]] = {name: [] for name in engines}
    order = list(engines)
    for step, index in enumerate([*warm, *range(len(batches))]):
        bench.progress(f"batches of {size}", step, len(warm) + len(batches))
        for name in order if step % 2 else order[::-1]:
            made = engines[name].generate(batches[index], bench.params)
            if step >= len(warm):
                runs[name].append(made)
    bench.progress(f"batches of {size}", 1, 1)
    return runs


def _cell(bench: _Bench, label: str, size: int, runs: _Runs) -> Cell:
    mine, plain = runs[label], runs[PLAIN]
    total = sum((output.metrics for batch in mine for output in batch), Metrics())
    ratios = [_speed([a]) / _speed([b]) for a, b in zip(mine, plain, strict=True)]
    own = [
        greedy_share(bench.plain, prompt, output.token_ids)
        for prompts, batch in zip(bench.batches(size), mine, strict=True)
        for prompt, output in zip(prompts, batch, strict=True)
    ]
    return Cell(
        method=label,
        batch_size=size,
        tokens_per_second=_speed(mine),
        speedup=_speed(mine) / _speed(plain),
        median_speedup=statistics.median(ratios),
        mean_acceptance_length=total.mean_acceptance_length,
        acceptance_rate=total.acceptance_rate,
        own_share=statistics.fmean(own),
    )


def _speed(batches: Sequence[Sequence[RequestOutput]]) -> float:
    """Tokens a second of all rows together."""
    tokens = sum(output.metrics.num_tokens for batch in batches for output in batch)
    return tokens / sum(batch[0].metrics.decode_seconds for batch in batches)


def write_json(report: Report, path: Path) -> None:
    """Every figure, the settings, the versions and the machine."""
    values = {
        "complete": report.stopped_by is None,
        "environment": benchmark.environment(),
        **dataclasses.asdict(dataclasses.replace(report, stopped_by=None)),
    }
    del values["stopped_by"]
    path.write_text(json.dumps(values, indent=1) + "\n", "utf-8")
