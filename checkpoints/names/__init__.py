"""Tables of names, one file a family: file tensor <-> leaf of `jspec.params`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class NameTable:
    """How one file format names the leaves of one family. Knows nothing of shapes or files."""

    layer: str
    """What comes before the name within a layer; `{}` stands for the layer's number."""
    in_layer: Mapping[str, str]
    """Name within a layer -> field of LayerParams."""
    top: Mapping[str, str]
    """Full name -> field of Params."""
    ignored: str
    """Full names (a regular expression) that are known not to be weights."""

    def leaf(self, name: str) -> str | None:
        """The leaf path of a file tensor; None for a known non-weight, KeyError when unknown."""
        if re.fullmatch(self.ignored, name):
            return None
        # No leading zeros: "layers.00" must not be a second name of layer 0.
        match = re.fullmatch(re.escape(self.layer).replace(r"\{\}", r"(0|[1-9]\d*)") + "(.+)", name)
        if match:
            return f"layers.{match[1]}.{self.in_layer[match[2]]}"
        return self.top[name]

    def file_name(self, leaf: str) -> str:
        """The name in the file of a leaf path: the inverse of `leaf`."""
        if not leaf.startswith("layers."):
            return {field: name for name, field in self.top.items()}[leaf]
        _, index, field = leaf.split(".")
        within = {field: name for name, field in self.in_layer.items()}
        return self.layer.format(index) + within[field]
