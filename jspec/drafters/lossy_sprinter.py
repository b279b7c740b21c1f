"""LOSSY drafting, for comparison only: drafts are kept without the target's word (SPRINTER,
arXiv 2502.04557).

SPRINTER trains a small classifier that says of each draft whether the target would accept it, and
asks the target only where it says no. Here the exit's own confidence stands for the classifier:
an approximation, which needs no training. And the target still runs once every K drafts at the
latest: its pages have to hold what was kept.

    the exit is sure of x and y, not of the token behind: drafts x y, both are kept, and the token
    behind them is the target's own

The text does not have the target's law, nor at temperature 0 its choices: `accuracy` says how
many of them it has.
"""

from __future__ import annotations

import dataclasses

from jspec.drafters.early_exit import EarlyExit


@dataclasses.dataclass(frozen=True)
class LossySprinter(EarlyExit):
    """Drafts while the exit is sure, to be judged by `verify.accept_all_lossy`."""

    stop: float = 0.6
    name: str = "lossy_sprinter"
