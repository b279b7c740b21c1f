"""Breaks the engine on purpose, one line at a time, and shows which test sees it.

    python tests/mutations.py            runs all; exits with 1 if a mutation goes unseen
    python tests/mutations.py 3 7        only these
    python tests/mutations.py --table    also writes docs/mutations.md

Each mutation is made in a copy of the working tree and runs the tests named beside it.
`tests/test_mutations.py` checks that every one still applies.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

from mutations_exits import EXITS
from mutations_free import TRAINING_FREE
from mutations_heads import TREES_AND_HEADS
from mutations_hierarchy import HIERARCHY
from mutations_layers import LAYERS
from mutations_lossy import EXITS_AND_LOSSY
from mutations_models import WHOLE_MODELS
from mutations_quantised import QUANTISED

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "mutations.md"
PROGRAMS = ".pytest_cache/xla"
"""Where `tests/conftest.py` keeps compiled programs."""


class Mutation(NamedTuple):
    """One broken line."""

    what: str
    file: str
    line: str
    """Occurs in the file exactly once."""
    broken: str
    tests: str
    """Arguments for pytest."""


MIXED = "tests/test_laws.py -k 'mixed_batch and not none'"
RULES = "pallas_kernels/rejection_sampling/reference.py"
MUTATIONS = (
    Mutation(
        "residual: the target's law instead of max(target - draft, 0)",
        RULES,
        "residual = jnp.maximum(target - jnp.where(rejected[:, None], draft, 0.0), 0.0)",
        "residual = target",
        MIXED,
    ),
    Mutation(
        "residual: a soft draft counts as certain",
        RULES,
        "probs = None if draft_probs is None else draft_probs[rows, at]",
        "probs = None",
        MIXED,
    ),
    Mutation(
        "acceptance: the draft's own probability is ignored",
        RULES,
        "coins * prob_at(draft_probs, draft_tokens) < target_prob",
        "coins < target_prob",
        MIXED,
    ),
    Mutation(
        "acceptance: of a place behind a rejected draft",
        RULES,
        "jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)",
        "jnp.sum(flags.astype(jnp.int32), axis=1, dtype=jnp.int32)",
        MIXED,
    ),
    Mutation(
        "acceptance: drafts that were not made",
        RULES,
        "jnp.arange(draft_tokens.shape[1]) < num_drafted[:, None]",
        "jnp.arange(draft_tokens.shape[1]) < num_drafted[:, None] + 9",
        "tests/test_verify.py -k only_what_was_drafted",
    ),
    Mutation(
        "penalty position: drafts of the same block are not counted",
        "jspec/sampling.py",
        "before = jnp.arange(D) < prefix.depths[..., None]",
        "before = jnp.arange(D) < 0 * prefix.depths[..., None]",
        MIXED,
    ),
    Mutation(
        "penalty position: all drafts are counted everywhere",
        "jspec/sampling.py",
        "before = jnp.arange(D) < prefix.depths[..., None]",
        "before = jnp.arange(D) < D + 0 * prefix.depths[..., None]",
        MIXED,
    ),
    Mutation(
        "penalties: presence counts the prompt",
        "jspec/sampling.py",
        "in_output = none.at[rows, jnp.where(is_prompt, vocab_size, tokens)]",
        "in_output = none.at[rows, tokens]",
        MIXED,
    ),
    Mutation(
        "bad words: drafts do not begin one",
        "jspec/sampling.py",
        "return jnp.where(drafted >= 0, drafts, committed)",
        "return jnp.where(drafted >= 9, drafts, committed)",
        MIXED,
    ),
    Mutation(
        "min_tokens: one place too few",
        "jspec/sampling.py",
        "too_early = prefix.positions < sampling.min_lengths[:, None]",
        "too_early = prefix.positions + 1 < sampling.min_lengths[:, None]",
        MIXED,
    ),
    Mutation(
        "filters: top_p before top_k has cut",
        "jspec/sampling.py",
        "kept = jnp.where(scaled >= floor, scaled, -jnp.inf)",
        "kept = scaled",
        "tests/test_sampling.py -k plain_reference",
    ),
    Mutation(
        "filters: after penalties that the temperature has divided",
        "jspec/sampling.py",
        "return logits - frequency * in_output",
        "return logits - inverse_temperature(sampling)[:, None, None] * frequency * in_output",
        "tests/test_sampling.py -k plain_reference",
    ),
    Mutation(
        "draft law: not the one drawn from",
        "jspec/drafters/base.py",
        "draws.draw(draws.law_of(logits, scale), key), softmax(logits, scale)",
        "draws.draw(draws.law_of(logits, scale), key), softmax(logits, 0.9 * scale)",
        MIXED,
    ),
    Mutation(
        "draft law: drawn although nothing is allowed",
        "jspec/drafters/base.py",
        "some = jnp.any(laws > 0, axis=-1).astype(jnp.int32)",
        "some = jnp.any(laws > -1, axis=-1).astype(jnp.int32)",
        "tests/test_laws.py -k knows_no_allowed",
    ),
    Mutation(
        "key derivation: the position does not enter",
        "jspec/draws.py",
        "for word in (positions, jnp.asarray(purpose)):",
        "for word in (0 * positions, jnp.asarray(purpose)):",
        "tests/test_laws.py -k 'mixed_batch and none'",
    ),
    Mutation(
        "key derivation: draft and target share their noise under rejection",
        "jspec/draws.py",
        "DRAFT = 1",
        "DRAFT = 0",
        "tests/test_laws.py -k 'mixed_batch and soft'",
    ),
    Mutation(
        "key derivation: group and member share their noise",
        "jspec/draws.py",
        "exponential(key, 1, jnp.arange(num_groups))",
        "exponential(key, 0, jnp.arange(num_groups))",
        "tests/test_sampling.py -k their_law",
    ),
    Mutation(
        "key derivation: the row's place in the batch enters",
        "jspec/sampling.py",
        "draws.draw_key(sampling.seed[:, None], positions",
        "draws.draw_key(jnp.arange(sampling.seed.size)[:, None], positions",
        "tests/test_decode.py -k other_rows",
    ),
    Mutation(
        "coupled: the draft has noise of its own",
        "jspec/drafters/base.py",
        "jnp.where(sampling.coupled, Purpose.TARGET, Purpose.DRAFT)",
        "jnp.where(sampling.coupled, Purpose.DRAFT, Purpose.DRAFT)",
        "tests/test_decode.py -k perfect_drafter",
    ),
    Mutation(
        "commit: one token too many",
        "jspec/cache.py",
        "keep = (index < count[:, None])",
        "keep = (index <= count[:, None])",
        "tests/test_decode.py -k uncommitted",
    ),
    Mutation(
        "commit: the draft model misses a fully accepted draft's last token",
        "jspec/drafters/draft_model.py",
        "return cache_lib.commit(state, passage.num_tokens)",
        "return cache_lib.commit(state, jnp.minimum(passage.num_tokens, self.num_draft_nodes))",
        "tests/test_decode.py -k perfect_drafter",
    ),
    Mutation(
        "attention: a token sees the next slot",
        "pallas_kernels/paged_attention/reference.py",
        "visible = age >= 0 if a.window is None",
        "visible = age >= -1 if a.window is None",
        "tests/test_decode.py -k uncached_reference",
    ),
    Mutation(
        "attention: what only the longest row has in pages counts as everybody's",
        "pallas_kernels/paged_attention/reference.py",
        "jnp.maximum(jnp.min(a.lengths) // KEY_TILE, first)",
        "jnp.maximum(jnp.max(a.lengths) // KEY_TILE, first)",
        "tests/test_paged_attention.py -k xla",
    ),
    Mutation(
        "attention kernel: the first token in flight is not put behind the pages",
        "pallas_kernels/paged_attention/fetch_sm90.py",
        "in_block = (slots >= place.length) & (slots < place.end)",
        "in_block = (slots > place.length) & (slots < place.end)",
        "tests/test_paged_attention.py -k 'tile and 1-interpret'",
    ),
    Mutation(
        "attention kernel: a tree's token sees its cousins",
        "pallas_kernels/paged_attention/kernel_sm90.py",
        "is_set = (lax.shift_right_logical(word, token & 31) & 1) == 1",
        "is_set = (lax.shift_right_logical(word, token & 31) & 1) >= 0",
        "tests/test_paged_attention.py -k 'tree-interpret'",
    ),
    Mutation(
        "attention kernel: what lies behind a row's end is not overwritten",
        "pallas_kernels/paged_attention/fetch_sm90.py",
        "out[:, columns] = jnp.where(in_pages, old, jnp.where(in_block, own, zeros))",
        "out[:, columns] = jnp.where(in_pages, old, own)",
        "tests/test_paged_attention.py -k 'not_there and bfloat16'",
    ),
    Mutation(
        "attention kernel: splits are added as if their largest scores were equal",
        "pallas_kernels/paged_attention/combine_sm90.py",
        "jnp.exp2(other_top - new_top)",
        "jnp.exp2(other_top - other_top)",
        "tests/test_paged_attention.py -k 'several_splits and interpret'",
    ),
    Mutation(
        "rejection kernel: a draft's law is subtracted once whatever is left",
        "pallas_kernels/rejection_sampling/kernel_sm90.py",
        "(x - factor_ref[row, stage] * y for",
        "(x - y for",
        "tests/test_rejection_kernels.py -k every_subtraction",
    ),
    Mutation(
        "laws: one NaN among the logits is overlooked",
        "jspec/draws.py",
        "jnp.isnan(jnp.sum(weights, axis=-1)) & (peak > -jnp.inf)",
        "jnp.isnan(jnp.sum(weights, axis=-1)) & (peak > jnp.inf)",
        "tests/test_sampling.py -k one_nan",
    ),
    Mutation(
        "stop order: the last stop in a run wins",
        "jspec/decode.py",
        "first = jnp.argmax(ends, axis=1)",
        "first = ends.shape[1] - 1 - jnp.argmax(ends[:, ::-1], axis=1)",
        "tests/test_decode.py -k 'comes_first or max_tokens'",
    ),
    Mutation(
        "stop order: stops behind the next token count",
        "jspec/decode.py",
        "ends = (is_stop | is_last) & (index < offered[:, None])",
        "ends = is_stop | is_last",
        MIXED,
    ),
    Mutation(
        "stop order: max_tokens one too late",
        "jspec/decode.py",
        "+ index + 1 >= state",
        "+ index >= state",
        "tests/test_decode.py -k max_tokens",
    ),
    Mutation(
        "stop strings: those inside one token's text only",
        "jspec/engine/text.py",
        "start = text.find(stop, max(ends_after - len(stop) + 1, 0))",
        "start = text.find(stop, ends_after)",
        "tests/test_parameters.py -k 'every_offset or find_stop'",
    ),
    Mutation(
        "stop strings: what was generated behind one stays in the state",
        "jspec/decode.py",
        "lengths=state.lengths - dropped,",
        "lengths=state.lengths,",
        "tests/test_decode.py -k row_that_is_cut",
    ),
    Mutation(
        "stop strings: rounds behind one are counted",
        "jspec/engine/batch.py",
        "counted = before < num_tokens",
        "counted = before < ALL_ROUNDS",
        "tests/test_parameters.py -k every_offset",
    ),
    Mutation(
        "logprobs: of the token one place on",
        "jspec/check.py",
        "logprobs = score(on_path(logits), run,",
        "logprobs = score(jnp.roll(logits, 1, axis=1), run,",
        "tests/test_parameters.py -k model_itself",
    ),
    Mutation(
        "logprobs: the raw ones where processed ones are asked for",
        "jspec/logprobs.py",
        "jnp.where(sampling.processed_logprobs[:, None, None], after, logits)",
        "jnp.where(sampling.processed_logprobs[:, None, None], logits, logits)",
        "tests/test_parameters.py -k processed",
    ),
    Mutation(
        "fork: children write into their parent's half-filled page",
        "jspec/cache.py",
        "shared = is_first[:, None] | (jnp.arange(pages_a_row) < filled)",
        "shared = is_first[:, None] | (jnp.arange(pages_a_row) <= filled)",
        "tests/test_cache.py -k fork",
    ),
    Mutation(
        "torch files: a pickle may call what it likes",
        "checkpoints/torch_file.py",
        "if (module, name) not in known:",
        "if (module, name) not in known and module != 'os':",
        "tests/checkpoints/test_torch_file.py -k nothing_but",
    ),
    Mutation(
        "idle rows: they take part in the round",
        "jspec/decode.py",
        "num_emitted = jnp.where(running, jnp.where(ended",
        "num_emitted = jnp.where(True, jnp.where(ended",
        MIXED,
    ),
    *(
        Mutation(*each)
        for each in (
            *TREES_AND_HEADS,
            *EXITS,
            *EXITS_AND_LOSSY,
            *TRAINING_FREE,
            *QUANTISED,
            *HIERARCHY,
            *WHOLE_MODELS,
            *LAYERS,
        )
    ),
)


class Outcome(NamedTuple):
    """What became of a mutation."""

    seen_by: list[str]
    """Names of the tests that failed."""
    seconds: float


def applied(mutation: Mutation, source: str) -> str:
    """The source with the line broken."""
    if source.count(mutation.line) != 1:
        count = source.count(mutation.line)
        raise ValueError(f"{mutation.what}: {mutation.file} has its line {count} times")
    return source.replace(mutation.line, mutation.broken)


def copy_of_tree(folder: Path) -> None:
    """With a copy of the programs that the last test run has compiled: most serve broken trees,
    too. A copy, as JAX writes them piece by piece: a worker that read half of another's would fail,
    and a failure counts as seen."""
    if (ROOT / PROGRAMS).is_dir():
        shutil.copytree(ROOT / PROGRAMS, folder / PROGRAMS)
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in files.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def try_out(mutation: Mutation, tree: Path) -> Outcome:
    """Runs the mutation's tests in `tree` with its line broken, up to the first failure."""
    path = tree / mutation.file
    source = path.read_text()
    path.write_text(applied(mutation, source))
    start = time.perf_counter()
    try:
        command = f"{sys.executable} -m pytest -n 0 -x -q -rfE {mutation.tests}"
        # The tree's own modules go before those installed.
        run = subprocess.run(
            ["bash", "-c", f"PYTHONPATH={tree} {command}"],
            cwd=tree,
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(source)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    if run.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.what}: pytest did not run\n{run.stdout}{run.stderr}")
    return Outcome(failed, time.perf_counter() - start)


def try_out_all(mutations: Sequence[Mutation], num_workers: int) -> list[tuple[Mutation, Outcome]]:
    """Outcomes in order, printed as they come; each worker breaks a copy of its own."""
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def work(mutation: Mutation) -> tuple[Mutation, Outcome]:
        tree = trees.get()
        try:
            outcome = try_out(mutation, tree)
        finally:
            trees.put(tree)
        seen = outcome.seen_by[0] if outcome.seen_by else "NOT SEEN"
        number = MUTATIONS.index(mutation)
        print(f"{number:2} {mutation.what}: {seen} ({outcome.seconds:.0f} s)", flush=True)
        return mutation, outcome

    with tempfile.TemporaryDirectory() as folder:
        for worker in range(num_workers):
            tree = Path(folder) / str(worker)
            copy_of_tree(tree)
            trees.put(tree)
        with futures.ThreadPoolExecutor(num_workers) as pool:
            return list(pool.map(work, mutations))


def table(outcomes: list[tuple[Mutation, Outcome]]) -> str:
    lines = [
        "# Mutations",
        "",
        "Each line was broken on purpose, alone, and the tests were run up to the first failure.",
        "Written by `python tests/mutations.py --table`; CI runs the script without it.",
        "",
        "| what is broken | file | first test that sees it |",
        "|---|---|---|",
    ]
    for mutation, outcome in outcomes:
        seen = outcome.seen_by[0].removeprefix("tests/") if outcome.seen_by else "**none**"
        name = re.sub(r"\[.*", "", seen)
        lines.append(f"| {mutation.what} | `{mutation.file}` | `{name}` |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("numbers", nargs="*", type=int, help="only these mutations")
    parser.add_argument("--table", action="store_true", help="write docs/mutations.md")
    options = parser.parse_args()
    chosen = [MUTATIONS[n] for n in options.numbers] if options.numbers else list(MUTATIONS)
    outcomes = try_out_all(chosen, min(os.cpu_count() or 1, 4))
    if options.table:
        TABLE.write_text(table(outcomes))
    return int(any(not outcome.seen_by for _, outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
