"""The weights of the tiny golden models, from names and shapes alone (numpy only).

The rule: for a parameter `name`, noise = `default_rng(crc32(name)).standard_normal(shape)` in
float64. A weight whose name ends in `norm.weight` is `1 + 0.1 * noise`, any other `0.3 * noise`,
rounded to float32. Two models with a parameter of the same name and shape share its values, so
that two cases can differ by their config alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

NORM_SCALE = 0.1
WEIGHT_SCALE = 0.3
"""Large for a 32-wide model, so that attention is peaked and positions matter to the logits."""


def golden_weights(
    names_and_shapes: Iterable[tuple[str, tuple[int, ...]]],
) -> dict[str, np.ndarray]:
    """The float32 array of each Hugging Face parameter name, of the shape given with it."""
    return {name: _golden_weight(name, tuple(shape)) for name, shape in names_and_shapes}


def _golden_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    values = 1.0 + NORM_SCALE * noise if name.endswith("norm.weight") else WEIGHT_SCALE * noise
    return values.astype(np.float32)
