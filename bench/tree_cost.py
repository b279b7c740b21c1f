"""What verifying a tree costs beside verifying a chain of as many tokens.

    python bench/tree_cost.py --json bench/results/cpu-tree.json

Whole rounds of the default model behind 4096 tokens, batch 1, greedy, bfloat16: a pass over the
block, the walk through it and the commit of what was accepted, for blocks of 8 to 64 tokens. The
chain, the tree and (the prefix being the same) nothing else differ. Timed in turn; medians of the
ratios of neighbours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import checkpoints
import jspec
from jspec.decode import DecodeConfig, DecodeState, init_state, run_rounds
from jspec.drafters.base import Context, Draft, Passage
from jspec.drafters.growth import StaticTree
from jspec.model import Model, llama
from jspec.sampling import neutral
from jspec.tree import Tree

CONTEXT, BLOCKS, ROUNDS = 4096, (8, 16, 32, 64), 8


@dataclasses.dataclass(frozen=True)
class FixedDrafter:
    """Drafts the same tokens every time, as a chain or as a tree of the same size."""

    num_draft_nodes: int
    is_tree: bool
    name: str = "fixed"
    taps: tuple[int, ...] = ()

    @property
    def num_speculative_tokens(self) -> int:
        return self.shape.depth if self.is_tree else self.num_draft_nodes

    @property
    def shape(self) -> StaticTree:
        """Of the size of Medusa's trees: the likeliest nodes of four levels."""
        return StaticTree.likeliest([[0.5, 0.2, 0.1, 0.06, 0.04]] * 4, self.num_draft_nodes)

    def init(self, batch: int, capacity: int, dtype: Any) -> tuple[()]:
        return ()

    def read(self, params: Any, state: tuple[()], context: Context, passage: Passage) -> tuple[()]:
        return state

    def commit(
        self, params: Any, state: tuple[()], context: Context, passage: Passage
    ) -> tuple[()]:
        return state

    def propose(self, params: Any, state: tuple[()], context: Context) -> tuple[Draft, tuple[()]]:
        B, P = context.lengths.size, self.num_draft_nodes
        tokens = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (B, P))
        tree = None
        if self.is_tree:
            paths = ((), *self.shape.paths)
            above = np.array([paths.index(path[:-1]) for path in paths[1:]], np.int32)
            parents = jnp.broadcast_to(jnp.asarray(above), (B, P))
            tree = Tree(parents=parents, depth=self.shape.depth, branching=self.shape.branching)
        return Draft(tokens, None, jnp.full((B,), P, jnp.int32), tree), state


def rounds_of(model: Model, params: Any, drafter: FixedDrafter) -> Callable[[], None]:
    """A call that runs `ROUNDS` rounds from the same state."""
    config = DecodeConfig(model, drafter, (drafter.num_draft_nodes + 1,))
    capacity = 2 * CONTEXT
    state = init_state(
        config,
        tokens=jnp.ones((1, capacity), jnp.int32),
        lengths=jnp.full((1,), CONTEXT, jnp.int32),
        max_lengths=jnp.full((1,), capacity, jnp.int32),
        sampling=neutral(1, model.vocab_size),
        page_size=16,
        dtype=jnp.bfloat16,
    )
    weights = (params, ())
    # The time does not depend on what the pages hold: nothing is read to fill them.
    state = state.replace(cache=state.cache.replace(lengths=state.lengths - 1))
    program = jax.jit(run_rounds, static_argnums=0)

    def call() -> None:
        done: DecodeState = program(config, weights, state, np.int32(ROUNDS))
        jax.block_until_ready(done.lengths)

    return call


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) / ROUNDS


def measure(repeats: int) -> list[dict[str, float]]:
    checkpoint = checkpoints.load(checkpoints.DEFAULT_MODEL, dtype="bfloat16")
    model, rows = llama(checkpoint.config), []
    for block in BLOCKS:
        chain, tree = (
            rounds_of(model, checkpoint.params, FixedDrafter(block - 1, is_tree))
            for is_tree in (False, True)
        )
        chain(), tree()
        pairs = [(seconds(chain), seconds(tree)) for _ in range(repeats)]
        rows.append(
            {
                "block_tokens": block,
                "chain_ms": 1e3 * statistics.median(c for c, _ in pairs),
                "tree_ms": 1e3 * statistics.median(t for _, t in pairs),
                "ratio": statistics.median(t / c for c, t in pairs),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    jspec.enable_compilation_cache()
    rows = measure(options.repeats)
    for row in rows:
        print(
            "{block_tokens:3} tokens  chain {chain_ms:6.1f} ms  tree {tree_ms:6.1f} ms  "
            "{ratio:.2f}".format(**row)
        )
    if options.json:
        report = {"context": CONTEXT, "jax": jax.__version__, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
