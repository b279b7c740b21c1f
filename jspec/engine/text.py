"""Text of one output as its tokens come, and the stop strings in it. Knows nothing of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Match(NamedTuple):
    """A stop string found in a text."""

    start: int
    end: int
    stop: str


def find_stop(text: str, stops: Sequence[str], ends_after: int) -> Match | None:
    """The stop string that is complete first, among those that end behind `ends_after`; of two
    that end together, the longer."""
    found = []
    for stop in stops:
        start = text.find(stop, max(ends_after - len(stop) + 1, 0))
        if start >= 0:
            found.append(Match(start, start + len(stop), stop))
    return min(found, key=lambda match: (match.end, match.start), default=None)


def length_of_possible_stop(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters of `text` may be the beginning of a stop string."""
    longest = max(map(len, stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


class OutputText:
    """Turns the tokens of one output into text, and says where a stop string ends it.

    Args:
      detokenizer: `push(ids) -> text` that no later id changes, and `flush()` for the rest.
      stops: the stop strings.
      include_stop: leave what stopped it, string or token, in the text.
      min_tokens: a stop string that is complete within so many tokens does not count.
    """

    def __init__(
        self, detokenizer: Any, stops: Sequence[str], *, include_stop: bool, min_tokens: int
    ) -> None:
        self._detokenizer, self._stops = detokenizer, stops
        self._include_stop, self._min_tokens = include_stop, min_tokens
        self._num_tokens = self._sent = 0
        self.text = ""
        """All of it so far."""
        self.stopped_by: str | None = None
        """The stop string that ended it."""

    def push(self, ids: Sequence[int], *, ended: bool, by_token: bool) -> int | None:
        """Takes the next tokens. If a stop string is complete among them, how many tokens of the
        output are left, the one that completed it included; what comes behind is ignored.

        `ended`: there are no more. `by_token`: the last one is a stop token, not text.
        """
        readable = ids[:-1] if by_token and not self._include_stop else ids
        # One by one only where it matters which token completes a stop string.
        pieces = [[token] for token in readable] if self._stops else [readable]
        start = self._num_tokens
        for piece in pieces:
            self._num_tokens += len(piece)
            if self._add(self._detokenizer.push(piece)):
                return self._num_tokens
        self._num_tokens = start + len(ids)
        if ended and self._add(self._detokenizer.flush()):
            return self._num_tokens
        return None

    def _add(self, piece: str) -> bool:
        """Appends a piece of text; whether a stop string is complete in it."""
        seen = len(self.text)
        self.text += piece
        if not piece or self._num_tokens <= self._min_tokens:
            return False
        match = find_stop(self.text, self._stops, seen)
        if match is None:
            return False
        self.stopped_by = match.stop
        self.text = self.text[: match.end if self._include_stop else match.start]
        return True

    def take(self, *, ended: bool) -> str:
        """The text since the last call that is sure to stay; all the rest when `ended`."""
        held = 0 if ended else length_of_possible_stop(self.text, self._stops)
        piece = self.text[self._sent : len(self.text) - held]
        self._sent += len(piece)
        return piece
