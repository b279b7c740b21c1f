"""Broken lines of quantised drafts, for `mutations.py`."""

# (what, file, line, broken, tests): see `mutations.Mutation`.
QUANTISED = (
    (
        "quantised: all groups have the step of their output",
        "jspec/quantised.py",
        "steps = jnp.clip(steps, 1, _LARGEST_STEP)",
        "steps = jnp.full_like(steps, _LARGEST_STEP)",
        "tests/test_quantised.py -k four_bits_are",
    ),
    (
        "quantised: a group's largest is cut off",
        "jspec/quantised.py",
        "steps = jnp.ceil(peaks",
        "steps = jnp.floor(peaks",
        "tests/test_quantised.py -k four_bits_are",
    ),
    (
        "quantised: values are rounded down",
        "jspec/quantised.py",
        "values = jnp.round(flat",
        "values = jnp.floor(flat",
        "tests/test_quantised.py -k eight_bits_are",
    ),
    (
        "quantised: groups are inputs far apart",
        "jspec/quantised.py",
        "return jnp.repeat(steps, group, axis=-1)[..., :width]",
        "return jnp.tile(steps, group)[..., :width]",
        "tests/test_quantised.py -k by_hand",
    ),
    (
        "quantised: all tokens share a scale",
        "jspec/quantised.py",
        "jnp.max(jnp.abs(wide), axis=-1, keepdims=True)",
        "jnp.max(jnp.abs(wide), keepdims=True)",
        "tests/test_quantised.py -k stands_for",
    ),
    (
        "quantised: the product leaves the steps out",
        "jspec/quantised.py",
        "return flat * _each_input(steps, weight.group, flat.shape[1])",
        "return flat",
        "tests/test_quantised.py -k by_hand",
    ),
    (
        "quantised: a tied head stays as it was",
        "jspec/quantised.py",
        "return params.replace(layers=layers, lm_head=few_bits(head, 1))",
        "return params.replace(layers=layers)",
        "tests/test_quantised.py -k shared",
    ),
    (
        "quantised: the draft has weights of its own table",
        "jspec/quantised.py",
        "return params.replace(layers=layers,",
        "return params.replace(embed=params.embed.copy(), layers=layers,",
        "tests/test_quantised.py -k shared",
    ),
)
