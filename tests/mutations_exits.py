"""Mutations of trained exits, for `mutations.MUTATIONS`."""

TRAINING = "tests/train/test_exits.py"
FILES = "tests/checkpoints/test_heads_exits.py"

EXITS = (
    (
        "exits: what stands behind the next token is learned instead of it",
        "jspec/train/step.py",
        "return [earlier(x, 1) for x in said], []",
        "return list(said), []",
        f"{TRAINING} -k by_hand",
    ),
    (
        "exits: later ones weigh less",
        "jspec/train/setup.py",
        "step_weights(J, decay=1.0) if are_equals else step_weights(J)",
        "step_weights(J)",
        f"{TRAINING} -k equals",
    ),
    (
        "exits: anchors as of draft steps",
        "jspec/train/setup.py",
        "anchors=(0,) * J if are_equals else tuple(range(J))",
        "anchors=tuple(range(J))",
        f"{TRAINING} -k equals",
    ),
    (
        "exits: each is handed the block of the first",
        "jspec/exits.py",
        "block=params.blocks[number]",
        "block=params.blocks[0]",
        f"{TRAINING} -k alone",
    ),
    (
        "exits: the stream is not normed",
        "jspec/exits.py",
        "normed = rms_norm(hidden, params.norm, eps)",
        "normed = hidden",
        f"{TRAINING} -k learned_nothing",
    ),
    (
        "exits: a new one begins without the target's norm",
        "jspec/train/new_head.py",
        "norms = tuple(jnp.array(target.final_norm, jnp.float32) for _ in blocks)",
        "norms = tuple(jnp.full(target.final_norm.shape, 2.0) for _ in blocks)",
        f"{TRAINING} -k learned_nothing",
    ),
    (
        "exits: tensors are named by number instead of layer",
        "checkpoints/names/heads.py",
        'f"exits.{layer}.block.weight": f"blocks.{number}"',
        'f"exits.{number}.block.weight": f"blocks.{number}"',
        f"{FILES} -k is_loaded",
    ),
    (
        "exits: layers in config.json need not be those of the tensors",
        "checkpoints/heads_config.py",
        "if there != config.layers:",
        "if len(there) < 2:",
        f"{FILES} -k damaged",
    ),
    (
        "exits: one may stand behind the whole target",
        "checkpoints/heads_config.py",
        "if there[-1] >= target.num_hidden_layers:",
        "if there[-1] > target.num_hidden_layers:",
        f"{FILES} -k another_target",
    ),
)
