"""Weights in eight or four bits, and their product with activations in eight.

A weight is an integer of eight bits times a scale for each output, so that whatever its group,
the product is one of int8 with int8 into int32 (a product for each group would read the weights
at half the speed). In four bits that integer is a value of four bits times its group's step, as
in QServe (arXiv 2405.04532, progressive group quantisation):

    weights 0.9 -0.5 | 0.09 0.04   two groups of two   scale 0.9 / 126 = 1 / 140
    steps   18       | 2           values 7 -4 | 6 3   eight bits 126 -72 | 12 6

Knows nothing of who drafts with it.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jspec.params import LayerParams, Params

_LARGEST = {8: 127, 4: 7}
"""Value of so many bits, by which the range is symmetric."""
_LARGEST_STEP = 18
"""18 x 7 is the largest product that eight bits hold."""
_INPUTS = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}
"""The weights of a layer, and how many of their last axes are inputs."""


class QuantisedWeight(flax.struct.PyTreeNode):
    """`values * steps * scales`, in place of a weight `[*out, *in]`."""

    values: Array  # int8 or int4, the weight's own shape
    scales: Array  # [*out] float32
    steps: Array | None = None  # [*out, G] int8; None: all 1
    group: int = flax.struct.field(pytree_node=False, default=1)  # inputs that share a step

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim


def quantise(params: Params, bits: int, group: int = 32) -> Params:
    """The same model with a `QuantisedWeight` of `bits` (8 or 4) in place of the weight of each
    product; in four bits, `group` inputs share a step. Embedding, norms, biases and a layer's own
    kinds of parts (experts, latent attention) are the arrays that they were; a head that is tied to
    the embedding becomes one of its own."""
    head = params.embed if params.lm_head is None else params.lm_head

    def few_bits(weight: Array, inputs: int) -> QuantisedWeight:
        return quantise_weight(weight, bits=bits, inputs=inputs, group=group)

    def layer_of(layer: LayerParams) -> LayerParams:
        weights = {name: getattr(layer, name) for name in _INPUTS}
        return layer.replace(
            **{n: few_bits(x, _INPUTS[n]) for n, x in weights.items() if x is not None}
        )

    layers = tuple(layer_of(layer) for layer in params.layers)
    return params.replace(layers=layers, lm_head=few_bits(head, 1))


@functools.partial(jax.jit, static_argnames=("bits", "inputs", "group"))
def quantise_weight(
    weight: Array, *, bits: int, inputs: int = 1, group: int = 32
) -> QuantisedWeight:
    """`weight` `[*out, *in]` to the nearest value, half a step of its group at most away; the last
    `inputs` axes are inputs. The last group is smaller where `group` does not divide them."""
    flat = weight.reshape(*weight.shape[: weight.ndim - inputs], -1).astype(jnp.float32)
    width, largest = flat.shape[-1], _LARGEST[bits]
    if bits == 8:
        scales, steps = _divided(jnp.max(jnp.abs(flat), axis=-1), largest), None
        step = jnp.float32(1)
    else:
        padded = jnp.pad(jnp.abs(flat), [(0, 0)] * (flat.ndim - 1) + [(0, -width % group)])
        peaks = jnp.max(padded.reshape(*flat.shape[:-1], -1, group), axis=-1)
        scales = _divided(jnp.max(peaks, axis=-1), largest * _LARGEST_STEP)
        steps = jnp.ceil(peaks / (largest * scales[..., None]))
        steps = jnp.clip(steps, 1, _LARGEST_STEP)
        step = _each_input(steps, group, width)
    values = jnp.round(flat / (step * scales[..., None]))
    values = jnp.clip(values, -largest, largest).reshape(weight.shape)
    if steps is None:
        return QuantisedWeight(values.astype(jnp.int8), scales)
    return QuantisedWeight(values.astype(jnp.int4), scales, steps.astype(jnp.int8), group)


def dequantise(weight: QuantisedWeight) -> Array:
    """The weight that it stands for, float32 in its own shape."""
    scales = weight.scales.reshape(-1, 1)
    return (_eight_bits(weight).astype(jnp.float32) * scales).reshape(weight.shape)


def quantised_product(x: Array, weight: QuantisedWeight, dtype: Any) -> Array:
    """`x` `[..., in]` times the transposed weight, with its axes flattened: `[..., out]`.

    Each token gets a scale of its own and is rounded to eight bits; sums are exact.
    """
    wide = x.astype(jnp.float32)
    scales = _divided(jnp.max(jnp.abs(wide), axis=-1, keepdims=True), _LARGEST[8])
    sums = jax.lax.dot_general(
        jnp.round(wide / scales).astype(jnp.int8),
        _eight_bits(weight),
        (((x.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32,
    )
    return (sums.astype(jnp.float32) * scales * weight.scales.reshape(-1)).astype(dtype)


def _eight_bits(weight: QuantisedWeight) -> Array:
    """`[out, in]` int8: the weight but for its scales."""
    flat = weight.values.reshape(weight.scales.size, -1).astype(jnp.int8)
    if weight.steps is None:
        return flat
    steps = weight.steps.reshape(weight.scales.size, -1)
    return flat * _each_input(steps, weight.group, flat.shape[1])


def _each_input(steps: Array, group: int, width: int) -> Array:
    """The step `[..., in]` of each of `width` inputs, from those of the groups `[..., G]`."""
    return jnp.repeat(steps, group, axis=-1)[..., :width]


def _divided(peaks: Array, largest: int) -> Array:
    """Scales at which `peaks` become `largest`; where all is zero, any will do."""
    return jnp.where(peaks > 0, peaks, 1.0) / largest
