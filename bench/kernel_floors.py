"""The tables of docs/kernels.md, from counted costs.

python bench/kernel_floors.py           print them
python bench/kernel_floors.py --write   put them into docs/kernels.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pallas_kernels import costs
from pallas_kernels.costs import H100, H200
from pallas_kernels.paged_attention.plan import Plan, make_plan

DOCS = Path(__file__).resolve().parents[1] / "docs" / "kernels.md"
BEGIN, END = "<!-- counted: bench/kernel_floors.py -->", "<!-- end -->"


class Model(NamedTuple):
    """One device's share of a model, and how many rows it decodes."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    batch: int


MODELS = (
    Model("Llama-3.1-8B", 32, 8, 128, 8),
    Model("Llama-3.3-70B TP8", 8, 1, 128, 32),
    Model("Qwen3-8B", 32, 8, 128, 16),
    Model("SmolLM2-135M", 9, 3, 64, 8),
)
STEPS = {"decode": 1, "verify K=7": 8, "tree P=64 or prefill 64": 64}
CONTEXTS = (1024, 8192, 32768)
PAGE_SIZE = 64


def attention_rows() -> Iterator[tuple[str, ...]]:
    for model in MODELS:
        for step, tokens in STEPS.items():
            for context in CONTEXTS:
                yield _attention_row(model, step, tokens, context)


def plan_for(model: Model, tokens: int, context: int) -> Plan:
    """Of the Hopper kernel, with a table that just holds the context and the block."""
    columns = (context + tokens + PAGE_SIZE - 1) // PAGE_SIZE
    return make_plan(
        queries=(model.batch, tokens, model.heads, model.head_dim),
        pages=(model.batch * columns, PAGE_SIZE, model.kv_heads, model.head_dim),
        table=(model.batch, columns),
        block_width=tokens,
        itemsize=2,
        scale=1.0,
        softcap=None,
        windowed=False,
        converts=False,
    )


def _attention_row(model: Model, step: str, tokens: int, context: int) -> tuple[str, ...]:
    plan = plan_for(model, tokens, context)
    least = costs.attention(
        batch=model.batch,
        tokens=tokens,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        context=context,
    )
    moved = costs.attention_of(plan, tokens=tokens, context=context)
    blocks = plan.batch * plan.num_kv_heads * plan.query_tiles * plan.splits
    return (
        f"{model.name}, B={model.batch}",
        step,
        f"{context:,}",
        f"{least.bytes / 1e6:.1f}",
        f"{least.flops / 1e9:.2f}",
        f"{least.floor(H100) * 1e6:.1f}{'' if least.is_memory_bound(H100) else ' (products)'}",
        f"{least.floor(H200) * 1e6:.1f}{'' if least.is_memory_bound(H200) else ' (products)'}",
        f"{moved.bytes / least.bytes:.2f}",
        f"{moved.flops / least.flops:.1f}",
        f"{blocks} of {plan.tiles_a_split * 64}",
    )


def verification_rows() -> Iterator[tuple[str, ...]]:
    for vocab in (128_256, 151_936):
        for batch in (1, 8, 64):
            for rule in ("coupled", "certain", "rejection"):
                cost = costs.verification(rule=rule, batch=batch, drafts=7, vocab=vocab)
                floors = (f"{cost.floor(gpu) * 1e6:.1f}" for gpu in (H100, H200))
                yield (rule, f"{vocab:,}", str(batch), f"{cost.bytes / 1e6:.1f}", *floors)


def tables() -> str:
    """Both tables in Markdown."""
    attention = (
        "model", "step", "context", "MB at least", "GFLOP", "H100, µs", "H200, µs",
        "kernel's bytes, ×", "its products, ×", "blocks of slots",
    )  # fmt: skip
    verification = ("rule", "V", "B", "MB at least", "H100, µs", "H200, µs")
    return "\n\n".join(
        "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))
        for head, rows in ((attention, attention_rows()), (verification, verification_rows()))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Counted floors of the Hopper kernels.")
    parser.add_argument("--write", action="store_true", help="write docs/kernels.md")
    if not parser.parse_args().write:
        print(tables())
        return
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    DOCS.write_text(f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
