"""Broken lines of latent attention, gates and experts, for `mutations.py`."""

# (what, file, line, broken, tests): see `mutations.Mutation`.
TRANSFORMERS = "tests/checkpoints/test_heads_kinds.py -k 'equal_transformers and {}'"
LAYERS = (
    (
        "experts: the bias that chooses weighs as well",
        "jspec/experts.py",
        "weights = jnp.take_along_axis(scores, chosen, axis=1)",
        "weights = jnp.take_along_axis(liking, chosen, axis=1)",
        "tests/test_experts.py -k bias_chooses",
    ),
    (
        "experts: a group is as good as its best one",
        "jspec/experts.py",
        "jax.lax.top_k(grouped, min(2, grouped.shape[-1]))",
        "jax.lax.top_k(grouped, min(1, grouped.shape[-1]))",
        "tests/test_experts.py -k best_two",
    ),
    (
        "experts: a tile is given to the expert before",
        "jspec/experts.py",
        'jnp.searchsorted(ends, jnp.arange(num_tiles), side="right")',
        'jnp.searchsorted(ends, jnp.arange(num_tiles), side="left")',
        "tests/test_experts.py -k sum_of_its_experts",
    ),
    (
        "experts: the shared one is taken in full",
        "jspec/experts.py",
        "if shared.switch is not None:",
        "if shared.switch is None:",
        TRANSFORMERS.format("qwen3_next"),
    ),
    (
        "latent attention: yarn does not sharpen it",
        "jspec/latent.py",
        "queries * _sharpened(config.rope_scaling)",
        "queries * _sharpened(None)",
        TRANSFORMERS.format("deepseek_v3"),
    ),
    (
        "latent attention: what turns of a key comes first",
        "jspec/latent.py",
        "keys = jnp.concatenate([pairs[..., :nope], shared], axis=-1)",
        "keys = jnp.concatenate([shared, pairs[..., :nope]], axis=-1)",
        TRANSFORMERS.format("deepseek_v3"),
    ),
    (
        "rope: numbers side by side turn as if half a head apart",
        "jspec/rope.py",
        "if config.rope_interleave:",
        "if config.rope_interleave is None:",
        TRANSFORMERS.format("deepseek_v3"),
    ),
    (
        "rope: the whole head turns where a part should",
        "jspec/config.py",
        "return int(self.head_dim * self.partial_rotary_factor)",
        "return int(self.head_dim * self.partial_rotary_factor**0)",
        TRANSFORMERS.format("glm4_moe"),
    ),
    (
        "heads: the gates of attention are forgotten",
        "jspec/heads.py",
        "return rest_of_layer(params, config.layers, residual, attended, heads.gates), memory",
        "return rest_of_layer(params, config.layers, residual, attended), memory",
        TRANSFORMERS.format("qwen3_next"),
    ),
    (
        "head files: experts are stacked from the last",
        "checkpoints/heads.py",
        "in zip(whole, parts_in_file(leaf, spec), strict=True):",
        "in zip(whole[::-1], parts_in_file(leaf, spec), strict=True):",
        "tests/checkpoints/test_heads_kinds.py -k test_deepseek",
    ),
    (
        "head files: the bias that chooses is rounded",
        "checkpoints/heads.py",
        "np.dtype(spec.dtype or building.dtype)",
        "np.dtype(building.dtype)",
        "tests/checkpoints/test_heads_kinds.py -k stays_in_float32",
    ),
    (
        "layers: a single row in 16 bits stays single",
        "jspec/layers.py",
        "rows = jnp.concatenate([rows, rows], axis=-2)",
        "rows = jnp.concatenate([rows], axis=-2)",
        "tests/test_model.py -k single_row",
    ),
    (
        "files: what a layer could have is written down",
        "checkpoints/arrays.py",
        "for name, value in vars(node).items() if value is not None}",
        "for name, value in vars(node).items()}",
        "tests/checkpoints/test_store.py -k could_have",
    ),
)
