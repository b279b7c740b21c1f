"""What drafters are called on the command line and in `LLM(drafter=)`.

    drafter   one, or several in order of preference: first,second,...
    one       NAME, NAME:ARGUMENT, a path, or NAME(one, ..., option=value, ...)

A comma or parenthesis within a path is taken for what it is only where the whole text is a path
that exists. Knows names, not what they stand for.
"""

from __future__ import annotations

import dataclasses

from jspec.errors import JspecError

_OPEN, _CLOSE = "(", ")"


@dataclasses.dataclass(frozen=True)
class Call:
    """`name(parts..., options...)`."""

    name: str
    parts: tuple[str | Call, ...]
    options: tuple[tuple[str, str], ...] = ()

    def take(self, option: str) -> tuple[str | None, Call]:
        """The option's value, None where it is not given, and the call without it."""
        others = tuple(pair for pair in self.options if pair[0] != option)
        return dict(self.options).get(option), dataclasses.replace(self, options=others)

    def expect(self, *counts: int) -> None:
        """JspecError unless there are no options left and one of `counts` parts."""
        if self.options:
            raise JspecError(f"drafter {self.name}: it has no option {self.options[0][0]!r}")
        if len(self.parts) not in counts:
            wanted = " or ".join(map(str, counts))
            raise JspecError(
                f"drafter {self.name}: it takes {wanted} in parentheses, not {len(self.parts)}"
            )


def parse(text: str) -> tuple[str | Call, ...]:
    """The drafters of a text, in order. JspecError names what cannot be read."""
    return tuple(_one(part, text) for part in _split(text, text))


def _one(part: str, whole: str) -> str | Call:
    if _OPEN not in part:
        return part
    name, _, rest = part.partition(_OPEN)
    if not rest.endswith(_CLOSE):
        raise JspecError(f"drafter {whole!r}: something stands behind the last parenthesis")
    parts, options = [], []
    for inner in _split(rest[:-1], whole):
        key, equals, value = inner.partition("=")
        if equals and _OPEN not in key:
            options.append((key.strip(), value.strip()))
        else:
            parts.append(_one(inner, whole))
    return Call(name.strip(), tuple(parts), tuple(options))


def _split(text: str, whole: str) -> list[str]:
    """The parts between commas that stand in no parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == _OPEN) - (character == _CLOSE)
        if depth < 0:
            raise JspecError(f"drafter {whole!r}: a parenthesis is closed that was not opened")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise JspecError(f"drafter {whole!r}: a parenthesis is not closed")
    parts = [part.strip() for part in parts]
    if not all(parts):
        raise JspecError(f"drafter {whole!r}: nothing stands before or behind a comma")
    return parts
