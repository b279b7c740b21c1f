"""Metrics of a training: a line each in a file, and a picture of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from jspec.train.shards import write_whole


class MetricsFile:
    """`metrics.jsonl`: what was measured at which step, in the order of the steps."""

    def __init__(self, path: Path, upto: int) -> None:
        """Lines of steps beyond `upto`, from a run that was stopped there, are gone."""
        self.path = path
        self.lines: list[dict[str, Any]] = [
            line for line in read_metrics(path) if line["step"] <= upto
        ]
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        write_whole(path, text.encode())

    def add(self, line: dict[str, Any]) -> None:
        """Appends a line."""
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def best_step(self) -> int | None:
        """The first step with the greatest mean length on what is held out; None where no line
        has one."""
        measured = [line for line in self.lines if "length" in line.get("held_out", {})]
        if not measured:
            return None
        return max(measured, key=lambda line: (line["held_out"]["length"], -line["step"]))["step"]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of the file; none where there is no file. The last may be cut off."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text("utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def draw_curves(lines: list[dict[str, Any]], path: Path) -> None:
    """A PNG of loss, agreement and acceptance over tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    above, middle, below = figure.subplots(3, 1, sharex=True)
    trained = [line for line in lines if "logit_loss" in line]
    held_out = [{**line, **line["held_out"]} for line in lines if "held_out" in line]
    engine = [{**line, **line["engine"]} for line in lines if "engine" in line]
    _plot(above, trained, "logit_loss", "step {}", "-")
    _plot(above, held_out, "logit_loss", "step {}, held out", ".--")
    _plot(middle, trained, "agreement", "step {}", "-")
    _plot(middle, held_out, "agreement", "step {}, held out", ".--")
    _plot(middle, engine, "acceptance", "position {}, engine", "x:")
    lengths = [line for line in held_out if "length" in line]
    _plot(below, lengths, "length", "held out, teacher forced", ".--")
    _plot(below, engine, "length", "engine", "x:")
    for axes, name in ((above, "cross entropy"), (middle, "agreement"), (below, "tokens a round")):
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="x-small", ncols=2)
    below.set_xlabel("tokens trained on")
    figure.savefig(path, dpi=100)


def _plot(axes: Any, lines: list[dict[str, Any]], name: str, label: str, style: str) -> None:
    """A curve for each number of `name`."""
    if not lines:
        return
    tokens = [line["tokens"] for line in lines]
    curves = zip(*(np.atleast_1d(line[name]).tolist() for line in lines), strict=True)
    for i, values in enumerate(curves):
        axes.plot(tokens, values, style, color=f"C{i}", label=label.format(i), linewidth=1)
