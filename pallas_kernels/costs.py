"""Counted costs: the bytes that a kernel's work must move, its operations, and so the time below
which no kernel can do it. Counted, not measured."""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.paged_attention.plan import TILE, Plan


class Gpu(NamedTuple):
    """A GPU by its data sheet."""

    name: str
    bytes_per_second: float
    """Of its memory."""
    flops_per_second: float
    """Dense bfloat16."""


H100 = Gpu("H100 SXM", 3.35e12, 989e12)
H200 = Gpu("H200 SXM", 4.8e12, 989e12)


class Cost(NamedTuple):
    """Work."""

    bytes: int
    """To and from the GPU's memory."""
    flops: int
    """Of matrix products, two for each multiplication."""

    def floor(self, gpu: Gpu) -> float:
        """Seconds at least, with transfers and products side by side."""
        return max(self.bytes / gpu.bytes_per_second, self.flops / gpu.flops_per_second)

    def is_memory_bound(self, gpu: Gpu) -> bool:
        return self.bytes / gpu.bytes_per_second > self.flops / gpu.flops_per_second


def attention(
    *,
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    page_itemsize: int = 2,
    itemsize: int = 2,
) -> Cost:
    """Any attention of `tokens` behind `context` committed slots in each row: keys and values
    once, queries in, results out; two products."""
    slots = batch * (context + tokens)
    ends = 2 * batch * tokens * heads * head_dim * itemsize
    return Cost(
        bytes=2 * slots * kv_heads * head_dim * page_itemsize + ends,
        flops=4 * batch * tokens * heads * head_dim * (context + tokens),
    )


def attention_of(plan: Plan, *, tokens: int, context: int, itemsize: int = 2) -> Cost:
    """What the Hopper kernel moves and multiplies for the same: whole tiles, padded query rows,
    and the sums of the splits, written and read once. Query tiles behind the first find keys and
    values in the second-level cache."""
    heads = plan.batch * plan.num_kv_heads
    slots = -(-(context + tokens) // TILE) * TILE
    rows = plan.query_tiles * plan.row_groups * TILE
    page_itemsize = 1 if plan.ahead else itemsize
    keys_values = 2 * heads * slots * plan.head_dim * page_itemsize
    ends = 2 * heads * plan.padded_rows * plan.head_dim * itemsize
    used_splits = -(-slots // (plan.tiles_a_split * TILE))
    sums = 2 * heads * used_splits * rows * (plan.head_dim + 2) * 4 if plan.splits > 1 else 0
    scores = 2 * heads * rows * plan.head_dim * slots
    return Cost(
        bytes=keys_values + ends + sums,
        flops=scores * plan.column_groups + scores,
    )


def verification(*, rule: str, batch: int, drafts: int, vocab: int, itemsize: int = 4) -> Cost:
    """Any verification from logits: every place's logits once; rejection reads the next token's
    place again, and "rejection" the law of the draft there, too ("certain": there is none)."""
    readings = {
        "coupled": (drafts + 1) * itemsize,
        "certain": (drafts + 2) * itemsize,
        "rejection": (drafts + 2) * itemsize + 4,
    }
    return Cost(bytes=batch * vocab * readings[rule], flops=0)
