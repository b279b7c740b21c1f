"""Drafters against plain decoding on a file of prompts, each prompt run by all of them in turn.

Interleaving makes a slow minute of the machine slow for everybody. What runs a prompt is a
`System`: plain decoding, a drafter, or another engine (`Peer`) in a process of its own; the
aggregation below knows nothing else about them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.errors import JspecError
from jspec.metrics import Metrics
from jspec.peer import Peer

PLAIN = "none"
"""The drafter that drafts nothing: plain decoding, the baseline of every comparison."""
PEER = "peer"
OVERALL = "overall"

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was asked for, as it stands in the JSON."""

    prompts: str
    model: str
    drafters: tuple[str, ...] = ("ngram",)
    num_speculative_tokens: int | None = None
    """None: what suits each drafter."""
    tree_nodes: int | None = None
    """Of heads: trees of this many tokens instead of chains."""
    tree_width: int = 4
    dtype: str = "bfloat16"
    max_tokens: int = 128
    repeats: int = 1
    limit: int | None = None
    categories: tuple[str, ...] = ()
    peer: str | None = None


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One question; `text` is sent as a single chat message."""

    question_id: str
    category: str
    text: str


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a system made of a prompt."""

    token_ids: tuple[int, ...]
    metrics: Metrics


System = Callable[[Prompt], Generation]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt run once by every system."""

    prompt: Prompt
    generations: Mapping[str, Generation]


@dataclasses.dataclass(frozen=True)
class Row:
    """A system against a baseline over the prompts of a category, or over all of them."""

    category: str
    num_prompts: int
    num_tokens: int
    tokens_per_second: float
    """Tokens of all prompts over the decoding time of all prompts."""
    baseline_tokens_per_second: float
    speedup: float
    median_speedup: float
    """Median of the ratios of the single runs."""
    acceptance_rate: float
    mean_acceptance_length: float
    acceptance_per_position: tuple[float, ...]
    num_same_text: int
    """Prompts on which both chose the same tokens in every repeat."""


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """How much of what the acceptance allows was realised, and the times it was judged by."""

    context_length: int
    plain_seconds: float
    verify_seconds: float
    """A target pass over K + 1 tokens."""
    wide_share: float
    """Share of the rounds that needed one; the others ran as narrow as a plain round."""
    draft_seconds: float
    possible_speedup: float
    """Mean acceptance length x plain round / (mean verification + drafting)."""
    efficiency: float
    """Measured speed-up / possible speed-up."""


@dataclasses.dataclass(frozen=True)
class Report:
    """A bench run, finished or not."""

    settings: Settings
    stopped_by: Exception | KeyboardInterrupt | None
    """What ended it before its time; None for a complete run."""
    samples: tuple[Sample, ...]
    comparisons: Mapping[str, tuple[Row, ...]]
    """System -> rows against plain decoding; for the peer, plain decoding against it."""
    efficiency: Mapping[str, Efficiency]


def load_prompts(path: Path) -> list[Prompt]:
    """Reads Spec-Bench lines, `{"question_id", "category", "turns": [...]}`; the first turn counts.

    Raises JspecError with the file and the line that is not one.
    """
    try:
        lines = path.read_text("utf-8").split("\n")  # not splitlines: U+2028 is no end
    except UnicodeDecodeError as error:
        raise JspecError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise JspecError(f"{path}: no prompts in it")
    return [_parse_prompt(line, f"{path}:{number}") for number, line in numbered]


def _parse_prompt(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise JspecError(f"{where}: not JSON ({error})") from None
    if not isinstance(entry, dict):
        raise JspecError(f"{where}: not a JSON object")
    category, turns = entry.get("category"), entry.get("turns")
    if not isinstance(category, str) or not category:
        raise JspecError(f"{where}: no category (a text)")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise JspecError(f"{where}: no turns (a list of texts)")
    if not turns[0].strip():
        raise JspecError(f"{where}: the first turn is empty")
    return Prompt(str(entry.get("question_id", where)), category, turns[0])


def select_prompts(
    prompts: Sequence[Prompt], categories: Sequence[str] = (), limit: int | None = None
) -> list[Prompt]:
    """The first `limit` prompts of each category asked for (none named: of all), in file order."""
    present = list(dict.fromkeys(prompt.category for prompt in prompts))
    for name in categories:
        if name not in present:
            raise JspecError(f"no category {name!r}; there are {', '.join(present)}")
    taken: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        if not categories or prompt.category in categories:
            taken[prompt.category] += 1
            if limit is None or taken[prompt.category] <= limit:
                chosen.append(prompt)
    return chosen


def one_per_capacity(lengths: Sequence[int]) -> list[int]:
    """Indices of the first length below each power of two, for compiling before timing."""
    first: dict[int, int] = {}
    for index, length in enumerate(lengths):
        first.setdefault((length - 1).bit_length(), index)
    return sorted(first.values())


def compare(samples: Sequence[Sample], system: str, baseline: str) -> tuple[Row, ...]:
    """A row a category in the order of the file, then the overall row."""
    if not samples:
        return ()
    names = list(dict.fromkeys(sample.prompt.category for sample in samples))
    groups = [[s for s in samples if s.prompt.category == name] for name in names]
    rows = [_row(n, group, system, baseline) for n, group in zip(names, groups, strict=True)]
    return (*rows, _row(OVERALL, samples, system, baseline))


def _row(category: str, samples: Sequence[Sample], system: str, baseline: str) -> Row:
    mine = [sample.generations[system] for sample in samples]
    theirs = [sample.generations[baseline] for sample in samples]
    total = sum((g.metrics for g in mine), Metrics())
    other = sum((g.metrics for g in theirs), Metrics())
    ratios = [
        _ratio(a.metrics.tokens_per_second, b.metrics.tokens_per_second)
        for a, b in zip(mine, theirs, strict=True)
    ]
    same: dict[Prompt, bool] = {}
    for sample, a, b in zip(samples, mine, theirs, strict=True):
        same[sample.prompt] = same.get(sample.prompt, True) and a.token_ids == b.token_ids
    return Row(
        category=category,
        num_prompts=len(same),
        num_tokens=total.num_tokens,
        tokens_per_second=total.tokens_per_second,
        baseline_tokens_per_second=other.tokens_per_second,
        speedup=_ratio(total.tokens_per_second, other.tokens_per_second),
        median_speedup=statistics.median(ratios),
        acceptance_rate=total.acceptance_rate,
        mean_acceptance_length=total.mean_acceptance_length,
        acceptance_per_position=total.acceptance_per_position,
        num_same_text=sum(same.values()),
    )


def _ratio(value: float, base: float) -> float:
    return value / base if base else 0.0


def wide_share(samples: Sequence[Sample], system: str, narrow_width: int) -> float:
    """Share of the rounds whose draft did not fit a block of `narrow_width` tokens."""
    metrics = sum((sample.generations[system].metrics for sample in samples), Metrics())
    # A draft of n tokens needs a block of n + 1: too long from position `narrow_width` on.
    too_long = metrics.drafted_per_position[narrow_width - 1 : narrow_width]
    return _ratio(sum(too_long), metrics.num_rounds)


def efficiency(overall: Row, times: Any, context_length: int, wide_share: float) -> Efficiency:
    """Judges the overall row by the times of single rounds (`LLM.measure_round`).

    Verification is counted at the mix of block widths that the rounds ran at.
    """
    verify = wide_share * times.verify_seconds + (1 - wide_share) * times.plain_seconds
    cost = verify + times.draft_seconds
    possible = overall.mean_acceptance_length * _ratio(times.plain_seconds, cost)
    return Efficiency(
        context_length=context_length,
        plain_seconds=times.plain_seconds,
        verify_seconds=times.verify_seconds,
        wide_share=wide_share,
        draft_seconds=times.draft_seconds,
        possible_speedup=possible,
        efficiency=_ratio(overall.speedup, possible),
    )


def median_context(samples: Sequence[Sample]) -> int:
    """Tokens in the context halfway through plain decoding of the median prompt."""
    metrics = [sample.generations[PLAIN].metrics for sample in samples]
    return round(statistics.median(m.num_prompt_tokens + m.num_tokens / 2 for m in metrics))


def load_engines(settings: Settings, progress: Progress) -> dict[str, Any]:
    """Drafter -> engine, plain decoding first; all share the weights of the target."""
    progress("starting", 0, 0)
    from jspec.drafter_loading import dynamic_tree  # late: JAX is slow
    from jspec.llm import LLM, enable_compilation_cache

    enable_compilation_cache()
    K = settings.num_speculative_tokens
    options: dict[str, Any] = {"dtype": settings.dtype, "max_num_seqs": 1, "progress": progress}
    plain = LLM(settings.model, drafter=PLAIN, **options)
    drafting = {
        "num_speculative_tokens": K,
        "tree": dynamic_tree(K, settings.tree_width, settings.tree_nodes),
    }
    names = [name for name in dict.fromkeys(settings.drafters) if name != PLAIN]
    engines = {PLAIN: plain}
    for name in names:
        engines[name] = LLM(plain, drafter=name, **drafting, **options)
    progress("starting", 1, 1)
    return engines


def run(
    settings: Settings, prompts: Sequence[Prompt], engines: Mapping[str, Any], progress: Progress
) -> Report:
    """Runs every prompt on every engine. A stop on the way ends it early, see `stopped_by`."""
    samples: list[Sample] = []
    judged: dict[str, Efficiency] = {}
    stopped_by = None
    try:
        _measure(settings, prompts, engines, samples, judged, progress)
    except (KeyboardInterrupt, JspecError) as error:
        if not samples:
            raise
        stopped_by = error
    drafters = [name for name in engines if name != PLAIN]
    comparisons = {name: compare(samples, name, PLAIN) for name in drafters or [PLAIN]}
    if settings.peer is not None:
        comparisons[PEER] = compare(samples, PLAIN, PEER)
    return Report(settings, stopped_by, tuple(samples), comparisons, judged)


def _measure(
    settings: Settings,
    prompts: Sequence[Prompt],
    engines: Mapping[str, Any],
    samples: list[Sample],
    judged: dict[str, Efficiency],
    progress: Progress,
) -> None:
    """Fills `samples` and `judged` as it goes, so that what is done survives an interruption."""
    from jspec.llm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=settings.max_tokens)
    plain = engines[PLAIN]
    token_ids = {p: plain.chat_prompt([{"role": "user", "content": p.text}]) for p in prompts}
    systems = {name: _system(llm, token_ids, params) for name, llm in engines.items()}
    with contextlib.ExitStack() as stack:
        if settings.peer is not None:
            peer = stack.enter_context(contextlib.closing(Peer(settings.peer)))
            systems[PEER] = peer_system(
                peer, token_ids, settings.max_tokens, plain.model.eos_token_ids
            )
        warm = one_per_capacity([len(token_ids[p]) + settings.max_tokens for p in prompts])
        _interleave(systems, [prompts[i] for i in warm], 1, [], "warming up", progress)
        _interleave(systems, prompts, settings.repeats, samples, "prompts", progress)
    context = median_context(samples)
    for name, engine in engines.items():
        if name != PLAIN:
            times = engine.measure_round(context, repeats=10)
            share = wide_share(samples, name, times.plain_width)
            judged[name] = efficiency(compare(samples, name, PLAIN)[-1], times, context, share)


def peer_system(
    peer: Peer,
    token_ids: Mapping[Prompt, list[int]],
    max_tokens: int,
    stop_ids: Sequence[int] = (),
) -> System:
    """The peer as a system, given the token ids that our own engine sees.

    A peer may go on past one of `stop_ids`: its text ends there, its speed counts all.
    """

    def generate(prompt: Prompt) -> Generation:
        ids, metrics = peer.generate(token_ids[prompt], max_tokens)
        return Generation(_cut(ids, stop_ids), metrics)

    return generate


def _system(llm: Any, token_ids: Mapping[Prompt, list[int]], params: Any) -> System:
    def generate(prompt: Prompt) -> Generation:
        (output,) = llm.generate([token_ids[prompt]], params)
        return Generation(tuple(output.token_ids), output.metrics)

    return generate


def _interleave(
    systems: Mapping[str, System],
    prompts: Sequence[Prompt],
    repeats: int,
    samples: list[Sample],
    label: str,
    progress: Progress,
) -> None:
    """Appends a sample a prompt and repeat; the order of the systems turns round each time."""
    total = len(prompts) * repeats
    progress(label, 0, total)
    for index in range(total):
        prompt = prompts[index // repeats]
        order = list(systems) if index % 2 == 0 else list(systems)[::-1]
        samples.append(Sample(prompt, {name: systems[name](prompt) for name in order}))
        progress(label, index + 1, total)


def _cut(token_ids: tuple[int, ...], stop_ids: Sequence[int]) -> tuple[int, ...]:
    """`token_ids` up to and with the first of `stop_ids`."""
    ends = (i + 1 for i, token in enumerate(token_ids) if token in stop_ids)
    return token_ids[: next(ends, len(token_ids))]


def write_json(report: Report, path: Path) -> None:
    """Every figure, the settings, the versions and the machine."""
    path.write_text(json.dumps(as_json(report), indent=1) + "\n", "utf-8")


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data; of each run its counters, not its text."""
    return {
        "complete": report.stopped_by is None,
        "settings": dataclasses.asdict(report.settings),
        "environment": environment(),
        "comparisons": {
            name: [dataclasses.asdict(row) for row in rows]
            for name, rows in report.comparisons.items()
        },
        "efficiency": {name: dataclasses.asdict(e) for name, e in report.efficiency.items()},
        "runs": [
            {
                "question_id": sample.prompt.question_id,
                "category": sample.prompt.category,
                **{n: dataclasses.asdict(g.metrics) for n, g in sample.generations.items()},
            }
            for sample in report.samples
        ],
    }


def environment() -> dict[str, Any]:
    """Date, versions and machine."""
    import jax

    now = datetime.datetime.now(datetime.UTC)
    installed = importlib.metadata.distributions(name="jspec-decoding")
    return {
        "date": now.isoformat(timespec="seconds"),
        "jspec": next((found.version for found in installed), "not installed"),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "devices": [device.device_kind for device in jax.devices()],
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text() if info.exists() else "", re.M)
    return found[1] if found else platform.machine()
