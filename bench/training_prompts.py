"""Prompts for on-policy training text, from a file of ShareGPT conversations.

    python bench/training_prompts.py ShareGPT_V3_unfiltered_cleaned_split.json prompts.jsonl

Writes lines in the format of Spec-Bench, in an order that any prefix of the file has every kind:
what people asked as it stands, short questions, passages to summarise, German sentences to
translate, and questions about a passage. The source file may be cut off at its end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

_GERMAN = re.compile(r"\b(und|der|die|das|ist|nicht|mit|ein|eine|für|von|auf|wird|sich)\b")
_QUESTION = re.compile(r"^(who|when|where|what|which|how)\b.{8,90}\?$", re.IGNORECASE)
_SHARES = {"plain": 8, "question": 3, "summary": 3, "translation": 3, "passage": 1}


def conversations(text: str) -> Iterator[list[dict[str, str]]]:
    """The conversations of a JSON list, item by item, up to where the file is cut off."""
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \r\n\t,":
            at += 1
        try:
            item, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        yield item["conversations"]


def by_kind(talks: Iterator[list[dict[str, str]]]) -> dict[str, list[str]]:
    """Prompts of each kind, in the order of the file."""
    found: dict[str, list[str]] = {kind: [] for kind in _SHARES}
    for talk in talks:
        asked = [turn["value"].strip() for turn in talk if turn["from"] == "human"]
        told = [turn["value"].strip() for turn in talk if turn["from"] == "gpt"]
        if asked and 20 <= len(asked[0]) <= 900:
            found["plain"].append(asked[0])
        found["question"] += [text for text in asked if _QUESTION.match(text)]
        long = [text for text in told if len(text) >= 900 and "```" not in text]
        for passage in (text[:1600].rpartition("\n")[0] for text in long[:1]):
            if len(passage) > 700 and not _is_german(passage):
                found["summary"].append(f"Summarize: {passage}")
                if asked and len(asked[0]) <= 200:
                    found["passage"].append(f"{passage}\n\n{asked[0]}")
        for text in itertools.chain(asked, told):
            if _is_german(text[:400]):
                sentences = re.split(r"(?<=[.!?])\s+", text)
                kept = [s for s in sentences if 50 <= len(s) <= 250 and "\n" not in s]
                found["translation"] += [f"Translate German to English: {s}" for s in kept[:8]]
    return found


def mixed(found: dict[str, list[str]], seed: int) -> Iterator[tuple[str, str]]:
    """(kind, prompt) without repeats, in proportion to the shares while each kind lasts."""
    rng = random.Random(seed)
    queues = {}
    for kind, prompts in found.items():
        queues[kind] = list(dict.fromkeys(prompts))
        rng.shuffle(queues[kind])
    cycle = [kind for kind, share in _SHARES.items() for _ in range(share)]
    while any(queues.values()):
        rng.shuffle(cycle)
        for kind in cycle:
            if queues[kind]:
                yield kind, queues[kind].pop()


def _is_german(text: str) -> bool:
    return len(_GERMAN.findall(text)) > len(text) / 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = by_kind(conversations(args.source.read_text("utf-8", errors="replace")))
    with args.dest.open("w", encoding="utf-8") as file:
        for number, (kind, prompt) in enumerate(mixed(found, args.seed)):
            line = {"question_id": number, "category": kind, "turns": [prompt]}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    print({kind: len(prompts) for kind, prompts in found.items()})


if __name__ == "__main__":
    main()
