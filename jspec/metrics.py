"""What a generation cost and how well its drafts did. Plain numbers; knows nothing of models."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Counters and times of one request, or (added with `+`) of several.

    A round is one forward pass of the target for this row. `num_accepted` never counts the extra
    (recovered or bonus) token that every round yields.
    """

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Tokens generated."""
    num_rounds: int = 0
    drafted_per_position: tuple[int, ...] = ()
    """Entry i: rounds that drafted a token at position i of the draft."""
    accepted_per_position: tuple[int, ...] = ()
    """Entry i: rounds that accepted it."""
    num_lossy: int = 0
    """Drafts kept without the target's word; 0 under every lossless rule."""
    prefill_seconds: float = 0.0
    """Time spent on the prompt of the batch that this request ran in."""
    decode_seconds: float = 0.0
    """Time of the generation loop of that batch."""

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted_per_position)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds: tokens a round, the extra token included."""
        return 1.0 + self.num_accepted / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of the tokens drafted at each position that were accepted."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return tuple(a / d if d else 0.0 for a, d in pairs)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time of the generation loop (the prompt left out)."""
        return self.num_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def __add__(self, other: Metrics) -> Metrics:
        """Sums every field; histograms of different length are padded with zeros."""

        def add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            width = max(len(a), len(b))
            a, b = a + (0,) * (width - len(a)), b + (0,) * (width - len(b))
            return tuple(x + y for x, y in zip(a, b, strict=True))

        values = {}
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            values[field.name] = add(mine, theirs) if isinstance(mine, tuple) else mine + theirs
        return Metrics(**values)
