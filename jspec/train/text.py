"""On-policy text: the target answers prompts, and what it says is what heads learn from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jspec.engine.requests import SamplingParams
from jspec.errors import JspecError
from jspec.llm import LLM
from jspec.train.settings import Progress
from jspec.train.shards import Shards


class Example(NamedTuple):
    """One answered prompt, as token ids."""

    prompt: list[int]
    answer: list[int]


def text_shards(folder: Path) -> Shards:
    """The files of a folder of text: a JSON line an example."""
    return Shards(folder, "jsonl")


def write_text(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    *,
    shard_size: int,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
    settings: dict[str, object],
    progress: Progress,
) -> None:
    """Answers `prompts`, `shard_size` of them a file; goes on where an earlier run stopped.

    File i is made at `temperatures[i % len(temperatures)]`, example j of all with seed
    `seed + j`. `settings` (what the prompts are, the model) are kept beside the files.
    """
    if not prompts:
        raise JspecError("no prompts fit: they must leave room for max_tokens")
    shards = text_shards(folder)
    shards.open(
        {
            "num_prompts": len(prompts),
            "shard_size": shard_size,
            "temperatures": list(temperatures),
            "max_tokens": max_tokens,
            "seed": seed,
            **settings,
        }
    )
    total = -(-len(prompts) // shard_size)
    done = set(shards.numbers())
    for number in range(total):
        progress("text", number, total)
        if number in done:
            continue
        first = number * shard_size
        asked = prompts[first : first + shard_size]
        temperature = temperatures[number % len(temperatures)]
        params = [
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + first + j)
            for j in range(len(asked))
        ]
        outputs = llm.generate(asked, params)
        lines = [
            json.dumps({"prompt": list(ids), "answer": list(output.outputs[0].token_ids)})
            for ids, output in zip(asked, outputs, strict=True)
        ]
        shards.write(number, ("\n".join(lines) + "\n").encode())
    progress("text", total, total)


def read_text(path: Path) -> Iterator[Example]:
    """The examples of one file of text."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            yield Example(list(map(int, entry["prompt"])), list(map(int, entry["answer"])))
        except (ValueError, KeyError, TypeError) as error:
            raise JspecError(f"{path}:{number}: not an example ({error}); make it again") from None
