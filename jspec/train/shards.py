"""A folder of numbered files made one by one, that can be stopped at any point and gone on with.

A file appears whole or not at all, and is a function of its number and the folder's settings, so
a folder that was finished after many interruptions is the folder that one run would have made.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.errors import JspecError

_SETTINGS = "settings.json"


@dataclasses.dataclass(frozen=True)
class Shards:
    """`folder` with files `00000.<suffix>`, `00001.<suffix>`, ... and the settings they share."""

    folder: Path
    suffix: str

    def open(self, settings: Mapping[str, Any]) -> None:
        """Makes the folder; one that is there already must have been made with the same settings.

        Raises JspecError naming the first setting that differs.
        """
        path = self.folder / _SETTINGS
        settings = json.loads(json.dumps(settings))
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, (json.dumps(settings, indent=1) + "\n").encode())
            return
        before = self.settings()
        for name in sorted(before.keys() | settings.keys()):
            if before.get(name) != settings.get(name):
                raise JspecError(
                    f"{self.folder} was begun with {name}={before.get(name)!r}, not "
                    f"{settings.get(name)!r}: use the same settings or another folder"
                )

    def settings(self) -> dict[str, Any]:
        """Those that the folder was made with. JspecError where it is not such a folder."""
        path = self.folder / _SETTINGS
        try:
            return json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise JspecError(f"{self.folder}: no {_SETTINGS} in it; make it first") from None
        except ValueError as error:
            raise JspecError(f"{path}: damaged ({error}); make the folder again") from None

    def path(self, number: int) -> Path:
        """Where file `number` is or will be."""
        return self.folder / f"{number:05}.{self.suffix}"

    def write(self, number: int, content: bytes) -> None:
        """File `number` is there with `content`."""
        write_whole(self.path(number), content)

    def numbers(self) -> list[int]:
        """The files that are there, ascending."""
        return sorted(int(p.stem) for p in self.folder.glob(f"[0-9]*.{self.suffix}"))


def write_whole(path: Path, content: bytes) -> None:
    """`path` holds `content`, or what it held before: never a part."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
