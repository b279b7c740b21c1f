"""What plans would do for models that do not fit here: counted costs instead of measured ones.

A pass is taken to move every weight once, and to be as fast as memory and tensor cores allow, of
which a stated share is reached; attention over the context and launches are left out. What exits
say is taken over from the texts of a smaller model: an exit behind so large a share of the layers
is right as often as the small one's. Both are assumptions, and `ASSUMPTIONS` is printed with every
table that comes of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jspec.config import ModelConfig
from jspec.plans import Costs, Sight
from pallas_kernels.costs import H100, Cost, Gpu

REACHED = 0.7
"""Share of the data sheet's bandwidth and products that a pass reaches."""
ASSUMPTIONS = (
    f"a pass moves its weights once at {REACHED:.0%} of {H100.bytes_per_second / 1e12:.2f} TB/s",
    f"or computes at {REACHED:.0%} of {H100.flops_per_second / 1e12:.0f} TFLOP/s, if that is more",
    "on several GPUs both divide by their number; links, attention and launches cost nothing",
    "an exit speaks over the whole vocabulary; n-grams cost nothing",
    "an exit behind a share of the layers agrees as often as the measured model's there",
)
_WIDTHS = (1, 64)
_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Size:
    """A model that the table is about."""

    name: str
    config: ModelConfig
    num_gpus: int = 1


def _llama(V: int, D: int, F: int, L: int, N: int, Nkv: int, H: int) -> ModelConfig:
    return ModelConfig(V, D, F, L, N, Nkv, H, 8192)


SIZES = (
    Size("Llama-3 8B", _llama(128_256, 4096, 14_336, 32, 32, 8, 128)),
    Size("Llama-3 70B", _llama(128_256, 8192, 28_672, 80, 64, 8, 128), num_gpus=4),
    Size("Qwen3 8B", _llama(151_936, 4096, 12_288, 36, 32, 8, 128)),
    Size("Qwen3 32B", _llama(151_936, 5120, 25_600, 64, 64, 8, 128), num_gpus=2),
)
"""As in their config.json."""


def layer_weights(config: ModelConfig) -> int:
    """Numbers in the matrices of one layer."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    return config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)


def counted(size: Size, gpu: Gpu = H100) -> Costs:
    """The parts of a round of rows of one."""
    config = size.config

    def seconds(weights: int) -> tuple[float, ...]:
        costs = [Cost(bytes=weights * _BYTES, flops=2 * weights * width) for width in _WIDTHS]
        return tuple(cost.floor(gpu) / (REACHED * size.num_gpus) for cost in costs)

    head = seconds(config.vocab_size * config.hidden_size)
    return Costs(
        widths=_WIDTHS,
        layer=seconds(layer_weights(config)),
        head=head,
        exit=head,
        ngrams=0.0,
        num_layers=config.num_hidden_layers,
    )


def stretched(texts: Sequence[Sight], num_layers: int, to: int) -> list[Sight]:
    """The same texts as if a model of `to` layers had said them: its exits stand at the same shares
    of its depth."""

    def deeper[Row](rows: Mapping[int, Row]) -> dict[int, Row]:
        return {max(1, round(layer * to / num_layers)): row for layer, row in rows.items()}

    return [text._replace(said=deeper(text.said), gaps=deeper(text.gaps)) for text in texts]
