"""The training of anything: to a folder with what was trained, its checkpoints and its metrics.

A run that was stopped at any point goes on from its last whole checkpoint and ends with the bits
that it would have ended with: a step is a function of the state, the step's number and settings.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jspec.train import data
from jspec.train.curves import MetricsFile, draw_curves
from jspec.train.saved import Checkpoints
from jspec.train.settings import Settings, Watching
from jspec.train.setup import Run, begin
from jspec.train.states import TargetOfText
from jspec.train.step import TrainState, measure_step, train_step


def train(
    target: TargetOfText,
    states: Sequence[Path],
    folder: Path,
    settings: Settings,
    watching: Watching | None = None,
    *,
    stop_after: int | None = None,
) -> None:
    """`folder` holds the head (`head/`), `metrics.jsonl`, `curves.png` and `checkpoints/`.

    Goes on where an earlier run with the same settings stopped, on the shards that it began with.
    `head/` is the one that did best on what is held out; while the training runs, the newest that
    was evaluated. `stop_after` ends this run at that step, short of the last.

    Raises JspecError as `setup.begin`.
    """
    train_to_end(*begin(target, states, folder, settings, watching or Watching()), stop_after)


def train_to_end(run: Run, first: TrainState, stop_after: int | None = None) -> None:
    """`run.folder` holds what was trained (`run.product`), as `train` says; `first` is the state
    before the first step."""
    checkpoints = Checkpoints(run.folder / "checkpoints")
    start, state = checkpoints.latest(first, run.watching.report) or (0, first)
    metrics, steps = MetricsFile(run.folder / "metrics.jsonl", start), run.settings.steps
    last = steps if stop_after is None else min(stop_after, steps)
    state = _steps(run, run.replicated(state), range(start, last), checkpoints, metrics)
    if last == steps:
        best = metrics.best_step()
        if best is not None and best < steps:
            state = checkpoints.load(best, first)
        _export(run, state)


def _steps(
    run: Run, state: TrainState, steps: range, checkpoints: Checkpoints, metrics: MetricsFile
) -> TrainState:
    """The state after all of `steps`. Sums stay on the device for `log_every` steps."""
    settings, watching = run.settings, run.watching
    shape = {"sequence_length": settings.sequence_length, "rows": settings.rows}
    batches = data.training_batches(
        run.corpus, seed=settings.seed, prompts_too=settings.prompts_too, **shape
    )
    held_out = data.held_out_batches(run.corpus, **shape)
    sums, clock = None, time.perf_counter()
    for done, rows in zip(steps, data.from_step(batches, steps.start), strict=False):
        watching.progress("training", done, settings.steps)
        sums = sums or run.replicated(run.objective.zero())
        state, sums = train_step(
            run.objective, run.optimiser, state, sums, run.frozen, run.batch(rows)
        )
        jax.block_until_ready(sums)
        step = done + 1
        measures = step % watching.eval_every == 0 or step == settings.steps
        saves = measures or step % watching.checkpoint_every == 0
        if saves or step % watching.log_every == 0:
            metrics.add(_logged(run, state, sums, time.perf_counter() - clock))
            sums, clock = None, time.perf_counter()
        if measures:
            metrics.add(_measured(run, state, held_out))
            clock = time.perf_counter()
        if saves:
            checkpoints.save(step, state, best=metrics.best_step())
            draw_curves(metrics.lines, run.folder / "curves.png")
    watching.progress("training", settings.steps, settings.steps)
    return state


def _logged(run: Run, state: TrainState, sums: Any, seconds: float) -> dict[str, Any]:
    """The line of metrics of what was learned since the last."""
    found = jax.device_get(sums)
    return {
        "step": int(state.step),
        "tokens": int(state.tokens),
        **found.means(),
        "tokens_per_second": round(float(found.tokens) / seconds, 1),
    }


def _measured(run: Run, state: TrainState, held_out: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of metrics of an evaluation; the product is what was evaluated."""
    objective = run.objective.measured()
    sums = run.replicated(objective.zero())
    for number, rows in enumerate(held_out):
        run.watching.progress("evaluating", number, len(held_out))
        sums = measure_step(objective, state.trained, sums, run.frozen, run.batch(rows))
    line = {
        "step": int(state.step),
        "tokens": int(state.tokens),
        "held_out": jax.device_get(sums).means(),
    }
    run.watching.progress("evaluating", len(held_out), len(held_out))
    _export(run, state)
    if run.watching.evaluator is not None:
        line["engine"] = run.watching.evaluator(run.folder / run.product)
    return line


def _export(run: Run, state: TrainState) -> None:
    """The product is that of `state`."""
    folder = run.folder / run.product
    shutil.rmtree(folder, ignore_errors=True)
    run.export(folder, jax.device_get(state.trained))
