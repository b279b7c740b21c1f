"""From files to text: what `LLM` and the commands make of checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_files import hf_config, hf_tensors, write_hf

import jspec
from jspec import JspecError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5]


def test_a_converted_folder_and_its_source_say_the_same(hf_folder, converted) -> None:
    texts = [
        jspec.LLM(path, dtype="float32", drafter=drafter).generate(PROMPT, GREEDY)[0].token_ids
        for path, drafter in ((hf_folder, "none"), (converted, "ngram"), (str(converted), "none"))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_checkpoint_drafts_for_itself(hf_folder, converted) -> None:
    llm = jspec.LLM(hf_folder, dtype="float32", drafter=converted, num_speculative_tokens=3)
    assert llm.drafter.name == converted.name
    (out,) = llm.generate(PROMPT, GREEDY)
    assert out.metrics.acceptance_rate == 1.0
    assert out.metrics.num_rounds == 3


def test_a_draft_with_another_vocabulary_is_refused(hf_folder, tmp_path) -> None:
    config = hf_config(vocab_size=2000)
    other = write_hf(tmp_path / "other", config=config, tensors=hf_tensors(config))
    sizes = rf"\(2000 tokens\) than the target \({hf_config()['vocab_size']}\)"
    with pytest.raises(JspecError, match=sizes):
        jspec.LLM(hf_folder, dtype="float32", drafter=other)


def test_a_missing_drafter_is_named(hf_folder, tmp_path) -> None:
    with pytest.raises(JspecError, match=r"drafter '.*/nowhere' is none of .* no such file"):
        jspec.LLM(hf_folder, dtype="float32", drafter=tmp_path / "nowhere")


def command(*args: object, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    line = [sys.executable, "-m", "jspec.cli", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, env=environment, check=False)


def test_the_commands_convert_and_generate(hf_folder, tmp_path) -> None:
    """Real processes: text on stdout, the figures on stderr, and nothing else."""
    done = command("convert", hf_folder, tmp_path / "out", cache=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    settings = ("--raw", "--max-tokens", 20, "--model", tmp_path / "out")
    run = command("generate", "a b", *settings, cache=tmp_path)
    assert run.returncode == 0
    assert run.stdout.strip()
    figures = run.stderr.splitlines()
    assert len(figures) == 1
    assert "tokens/s" in figures[0]
    assert len(figures[0]) <= 80
    again = command("convert", hf_folder, tmp_path / "out", cache=tmp_path)
    assert again.returncode == 2
    assert again.stderr.startswith("error: ")
    assert again.stderr.count("\n") == 1
