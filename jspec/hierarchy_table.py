"""The report of `hierarchy` on the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jspec.calibrate import Calibration
from jspec.cost_model import ASSUMPTIONS
from jspec.hierarchy import HISPEC, SINGLE, Report
from jspec.plans import Forecast, agreement


def print_report(report: Report) -> None:
    """The table of methods by batch sizes, what was chosen and why, memory, and predictions; at
    most 80 columns wide."""
    console = Console()
    console.print(_table(report))
    for method in report.methods:
        console.print(f"{method.label}: {method.drafter}", highlight=False, markup=False)
        console.print(f"  {method.why}", highlight=False, markup=False)
    console.print(_memory_line(report), highlight=False)
    console.print(_predictions(report))
    for line in ASSUMPTIONS:
        console.print(f"  assumed: {line}", highlight=False, markup=False)


def print_choice(best: Mapping[str, tuple[Forecast, str]], found: Calibration) -> None:
    """What exits say and cost, the best plan of each kind and why."""
    console, costs = Console(), found.costs
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("exit behind layer", "right", "ms a drafted token"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for layer, share in agreement(found.texts).items():
        step = layer * costs.at("layer", 1) + costs.at("exit", 1)
        grid.add_row(str(layer), f"{share:.1%}", f"{1e3 * step:.2f}")
    console.print(grid)
    plain = f"plain decoding takes {1e3 * costs.plain():.2f} ms a token"
    console.print(plain, highlight=False)
    for label, (forecast, why) in best.items():
        console.print(f"{label}: {why}", highlight=False, markup=False)
        console.print(f'  --drafter "{forecast.plan.drafter}"', highlight=False, markup=False)


def _table(report: Report) -> Table:
    speeds = report.plain_tokens_per_second
    title = f"{report.settings.model}, {report.settings.dtype}, times plain decoding by batch size"
    grid = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    grid.add_column("method", max_width=18, no_wrap=True)
    for heading in (*map(str, speeds), "length", "accept", "own text"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for method in report.methods:
        cells = [cell for cell in report.cells if cell.method == method.label]
        first = cells[0]
        grid.add_row(
            method.label,
            *(f"{cell.speedup:.2f}" for cell in cells),
            f"{first.mean_acceptance_length:.2f}",
            f"{first.acceptance_rate:.2f}",
            f"{first.own_share:.1%}",
        )
    grid.add_section()
    grid.add_row("plain, tokens/s", *(f"{speed:.0f}" for speed in speeds.values()), "", "", "")
    return grid


def _memory_line(report: Report) -> str:
    single, cascade = (report.resident_bytes[x] for x in (SINGLE, HISPEC))
    return (
        f"memory of the cascade over the single exit: {cascade - single} bytes of {single} "
        f"({(cascade - single) / single:.4%})"
    )


def _predictions(report: Report) -> Table:
    title = "cost model, H100, batch 1: counted, not measured"
    grid = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("model", "method"):
        grid.add_column(heading, no_wrap=True)
    for heading in ("ratio", "length"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for one in report.predicted:
        length = f"{one.mean_acceptance_length:.2f}"
        grid.add_row(one.model, one.method, f"{one.speedup:.2f}", length)
    return grid
