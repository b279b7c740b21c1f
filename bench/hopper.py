"""What the Hopper kernels do on a real H100 or H200: right results, speed, tokens a second.

    python bench/hopper.py --out bench/results/h100.json
    python bench/hopper.py --dry-run --out /tmp/trial.json    tiny shapes, on any machine

Takes less than eight minutes and stops cleanly at `--seconds`. Each section runs in a process of
its own, which writes every figure as it comes: a kernel that crashes the device, or never ends,
costs its own case, and the next process goes on behind it. Ends with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECTIONS = {
    "rates": 40,
    "correctness": 110,
    "attention": 100,
    "sampling": 50,
    "generation": 150,
    "more attention": 100,
}
"""Most seconds of each, of the 450 by default; what one leaves goes to the last ones."""
PATIENCE = {"generation": 300}
"""Seconds without a new figure after which a process is given up; in other sections STALLED."""
STALLED = 75
UNFINISHED = "did not end"
Case = Callable[[], dict[str, Any]]
Cases = dict[str, Case]


def rates(trial: bool) -> Cases:
    """What the device is, and what it reaches: the measures that kernels are compared with."""
    import jax
    import jax.numpy as jnp

    def seconds_of(function: Any, *arguments: Any) -> float:
        program, taken = jax.jit(function), []
        for _ in range(3 if trial else 22):
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[2:])

    found = jax.devices()[0]
    capability = str(getattr(found, "compute_capability", "none"))
    suits = trial or (found.platform == "gpu" and capability == "9.0")

    def device() -> dict[str, Any]:
        if not suits:
            raise ValueError(f"needs a GPU of compute capability 9.0, found {found.device_kind}")
        memory = (found.memory_stats() or {}).get("bytes_limit")
        return {"name": found.device_kind, "capability": capability, "memory": memory}

    def copy() -> dict[str, Any]:
        x = jnp.zeros(((1 << 20) if trial else (1 << 29),), jnp.int32)
        seconds = seconds_of(lambda x: x + 1, x)
        return {"seconds": seconds, "bytes_per_second": 2 * x.nbytes / seconds}

    def matrix() -> dict[str, Any]:
        size = 256 if trial else 8192
        x, y = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in (0, 1))
        seconds = seconds_of(jnp.matmul, x, y)
        return {"seconds": seconds, "flops_per_second": 2 * size**3 / seconds}

    return {"device": device} | ({"copy": copy, "matrix": matrix} if suits else {})


def correctness(trial: bool) -> Cases:
    """Each kernel against float64, with inputs that no one has seen before."""
    import hopper_kernels as kernels

    implementations = ("xla", "interpret") if trial else ("mosaic", "xla")

    def seeded(check: Any, case: Any) -> Case:
        def run() -> dict[str, Any]:
            seed = secrets.randbits(32)
            return {"seed": seed} | check(case, seed, implementations)

        return run

    attention = kernels.TINY_CHECKS if trial else kernels.CHECKS
    cases = {f"attention, {c.name}": seeded(kernels.check_attention, c) for c in attention}
    return cases | {c.name: seeded(kernels.check_sampling, c) for c in verifications(trial)}


def verifications(trial: bool, batches: tuple[int, ...] = (8,)) -> list[Any]:
    """Shapes of verification: Llama 3's and Qwen 3's vocabulary."""
    from hopper_kernels import Sampling

    rules = ("rejection", "rejection, certain drafts", "coupled")
    if trial:
        return [Sampling(rule, 3, 2, 1024) for rule in rules[::2]]
    sizes = (128_256, 151_936)
    return [Sampling(rule, b, 7, size) for b in batches for size in sizes for rule in rules]


def attentions(trial: bool) -> tuple[list[Any], list[Any]]:
    """Shapes of attention, the telling ones first; what time is left for comes second."""
    from hopper_kernels import Attention, Heads

    widths = {"decode": 1, "verify": 8, "tree": 64, "prefill": 64}
    models = {
        "Llama 3.1 8B, Qwen3 8B": Heads(32, 8, 128),
        "Llama 3.3 70B, one device of 8": Heads(8, 1, 128),
        "SmolLM2 135M": Heads(9, 3, 64),
    }

    def shape(model: int, kind: str, context: int, batch: int) -> Any:
        name = list(models)[model]
        return Attention(name, models[name], kind, widths[kind], context, batch)

    if trial:
        tiny = Attention("tiny", Heads(4, 2, 64), "verify", 4, 64, 2)
        return [tiny], [tiny._replace(kind="tree")]
    first = [shape(0, kind, 8192, 8) for kind in widths]
    first += [shape(0, k, c, 8) for c in (1024, 32_768) for k in ("decode", "verify")]
    first += [shape(1, kind, 8192, 8) for kind in ("decode", "verify", "tree")]
    first += [shape(0, k, 8192, b) for b in (1, 64) for k in ("decode", "verify")]
    first += [shape(2, k, 1024, 8) for k in ("decode", "verify")]
    wanted = [
        shape(model, kind, context, batch)
        for context in (32_768, 1024, 8192)
        for batch in (1, 8, 64)
        for kind in widths
        for model in range(len(models))
    ]
    more = [x for x in wanted if x not in first and x.cost.bytes < 20e9]
    return first, more


def timed_attention(trial: bool, *, more: bool) -> Cases:
    import hopper_kernels as kernels

    implementations, repeats = (("xla",), 1) if trial else (("mosaic", "xla"), 7)
    return {
        c.name: functools.partial(kernels.time_attention, c, implementations, repeats)
        for c in attentions(trial)[more]
    }


def timed_sampling(trial: bool) -> Cases:
    import hopper_kernels as kernels

    implementations, repeats = (("xla",), 1) if trial else (("mosaic", "xla"), 7)
    return {
        c.name: functools.partial(kernels.time_sampling, c, implementations, repeats)
        for c in verifications(trial, batches=(8, 64))
    }


def generation(trial: bool) -> Cases:
    """Whole rounds of a model of Llama 3.1 8B's shape, with random weights."""
    import hopper_generation as rounds

    return {
        f"{drafter}, B={batch}, context {context}": functools.partial(
            rounds.measure, drafter, batch, context, trial=trial
        )
        for batch, context in (((2, 64),) if trial else ((1, 512), (8, 4096)))
        for drafter in (("ngram",) if trial else ("ngram", "none"))
    }


CASES: dict[str, Callable[[bool], Cases]] = {
    "rates": rates,
    "correctness": correctness,
    "attention": functools.partial(timed_attention, more=False),
    "sampling": timed_sampling,
    "generation": generation,
    "more attention": functools.partial(timed_attention, more=True),
}


def run_cases(section: str, part: Path, deadline: float, trial: bool) -> int:
    """In a process of its own: runs those cases of a section that `part` does not hold yet, and
    writes there what comes of each. 0: all are done or time is up; 3: a new process is needed."""
    results = json.loads(part.read_text()) if part.exists() else {}
    for name, case in CASES[section](trial).items():
        if name in results:
            continue
        if time.time() > deadline:
            break
        results[name] = {"error": UNFINISHED}
        write_json(part, results)
        start = time.time()
        try:
            results[name] = case()
        except Exception as error:
            lines = traceback.format_exception(error)
            results[name] = {"error": f"{type(error).__name__}: {error}", "trace": lines[-6:]}
        results[name]["took"] = time.time() - start
        write_json(part, results)
        if "error" in results[name] and "RuntimeError" in results[name]["error"]:
            return 3  # the device may be unusable in this process
    return 0


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all, whenever the process is killed."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(value, indent=2) + "\n")
    scratch.replace(path)


def run_section(section: str, folder: Path, deadline: float, trial: bool) -> dict[str, Any]:
    """The figures of a section, from as many processes as it takes."""
    part, error = folder / f"{section}.json", None
    while time.time() < deadline:
        before = part.read_text() if part.exists() else ""
        code = run_process(section, part, deadline, trial)
        after = part.read_text() if part.exists() else ""
        if code == 0:
            break
        if after == before:  # it did not get to a case
            error = f"the process of this section ended with {code}"
            break
    found = json.loads(part.read_text()) if part.exists() else {}
    last = next(reversed(found), None)
    if last is not None and found[last] == {"error": UNFINISHED} and time.time() > deadline:
        found[last] = {"cut_off": "the time of this section was up"}
    return found | ({"section": {"error": error}} if error else {})


def run_process(section: str, part: Path, deadline: float, trial: bool) -> int:
    """Its exit status; a process that does not get on, or not to an end, is killed."""
    command = [sys.executable, __file__, "--section", section, "--out", str(part)]
    command += ["--deadline", str(deadline)] + (["--dry-run"] if trial else [])
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})
    progress, seen = time.time(), 0.0
    while process.poll() is None:
        time.sleep(0.2)
        written = part.stat().st_mtime if part.exists() else 0.0
        if written != seen:
            progress, seen = time.time(), written
        if time.time() > min(deadline + 25, progress + PATIENCE.get(section, STALLED)):
            process.kill()
            process.wait()
            return -1
    return process.returncode


def add_fractions(report: dict[str, Any]) -> None:
    """Puts beside each time which part of the measured bandwidth and matrix rate it comes to."""
    measured = report["sections"].get("rates", {})
    limits = {
        "least_bytes": ("of_copy_bandwidth", measured.get("copy", {}).get("bytes_per_second")),
        "flops": ("of_matrix_rate", measured.get("matrix", {}).get("flops_per_second")),
    }
    for figures in report["sections"].values():
        for case in figures.values():
            for work, (label, limit) in limits.items():
                for found in case.values():
                    if work in case and limit and isinstance(found, dict) and "seconds" in found:
                        found[label] = case[work] / found["seconds"] / limit


def wrongs(value: Any, where: str = "") -> list[str]:
    """Every error and every wrong result in a report, with its place."""
    if not isinstance(value, dict):
        return []
    found = [f"{where}: {value['error']}"] if value.get("error") else []
    if value.get("correct") is False:
        found.append(f"{where}: wrong result")
    return found + [
        w for key, x in value.items() for w in wrongs(x, f"{where} / {key}".strip(" /"))
    ]


def summary(report: dict[str, Any]) -> list[str]:
    """A line for each time."""
    lines = []
    for figures in report["sections"].values():
        for name, case in figures.items():
            for implementation, found in case.items():
                if not isinstance(found, dict) or "seconds" not in found:
                    continue
                part = found.get("of_copy_bandwidth")
                share = f"{part:6.1%} of copy bandwidth" if part else ""
                if "tokens_per_second" in found:
                    share = f"{found['tokens_per_second']:8.1f} tokens/s"
                line = f"{name:70} {implementation:9} {1e6 * found['seconds']:11.1f} us {share}"
                lines.append(line)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Hopper kernels on a real device.")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=450.0, help="stop after so long")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on any machine")
    parser.add_argument("--section", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        return run_cases(options.section, options.out, options.deadline, options.dry_run)
    start = time.time()
    end, scale = start + options.seconds, options.seconds / 450
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    report: dict[str, Any] = {"versions": versions, "dry_run": options.dry_run, "sections": {}}
    with tempfile.TemporaryDirectory() as folder:
        for section, most in SECTIONS.items():
            last = section == list(SECTIONS)[-1]
            deadline = end - 10 if last else min(end - 10, time.time() + most * scale)
            found = run_section(section, Path(folder), deadline, options.dry_run)
            report["sections"][section] = found
            report["seconds"] = time.time() - start
            add_fractions(report)
            write_json(options.out, report)
            if section == "rates" and "name" not in found.get("device", {}):
                reason = found.get("device", found.get("section", {})).get("error", "no answer")
                print(reason.removeprefix("ValueError: "), file=sys.stderr)
                return 2
    wrong = wrongs(report["sections"])
    print("\n".join(summary(report) + wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
