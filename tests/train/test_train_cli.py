"""`jspec train` from prompts to an evaluated head, on a tiny model's folder."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jspec import cli

sys.path.append(str(Path(__file__).parents[1] / "checkpoints"))
from checkpoint_files import hf_config, write_hf


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with a model and prompts."""
    folder = tmp_path_factory.mktemp("cli")
    write_hf(folder / "model", hf_config(max_position_embeddings=128))
    words = ("hello", "hello hello", "well", "a b c")
    lines = [
        {"question_id": i, "category": "words", "turns": [f"{word} {i}"]}
        for i, word in enumerate(words * 2)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run(monkeypatch, root):
    """Runs the command in this process, in a cache of its own; gives code, stdout, stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    monkeypatch.setattr("jspec.llm.enable_compilation_cache", lambda path=None: None)
    runner = CliRunner()

    def invoke(*args: object) -> tuple[int, str, str]:
        result = runner.invoke(cli.app, ["train", *map(str, args)], prog_name="jspec")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return invoke


def test_from_prompts_to_a_head(run, root):
    prompts, text, states, out = (
        root / name for name in ("prompts.jsonl", "text", "states", "out")
    )
    asked = ["text", "--prompts", prompts, "--out", text, "--model", root / "model"]
    sizes = ["--rows", 4, "--max-tokens", 12, "--max-length", 100]
    assert run(*asked, *sizes) == (0, f"answered 8 prompts in {text}\n", "")
    assert json.loads((text / "settings.json").read_text()) == {
        "num_prompts": 8,
        "shard_size": 4,
        "temperatures": [0.0, 0.0, 0.7],
        "max_tokens": 12,
        "seed": 0,
        "model": str(root / "model"),
        "prompts": "prompts.jsonl",
    }
    made = ["states", "--text", text, "--out", states]
    assert run(*made) == (0, f"added 2 shards to {states}\n", "")
    assert run(*made) == (0, f"added 0 shards to {states}\n", "")
    small = ["--batch-tokens", 128, "--sequence-length", 64, "--draft-vocab-size", 64]
    short = ["--steps", 4, "--warmup", 1, "--unroll", 2, "--mesh", "data=2"]
    watched = ["--eval-prompts", prompts, "--eval-tokens", 4]
    trained = ["head", "--family", "mtp", "--states", states, "--out", out]
    assert run(*trained, *small, *short, *watched) == (0, f"wrote {out / 'head'}\n", "")
    *_, last = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert last["step"] == 4
    assert last["engine"]["length"] >= 1
    behind = ["exits", "--layers", "1", "--states", states, "--out", root / "exits"]
    wanted = "error: {}: has no states of tap 1, which this family reads; make them with --taps 1\n"
    assert run(*behind, *small) == (2, "", wanted.format(states))
    made = ["states", "--text", text, "--out", root / "deep", "--taps", "1"]
    assert run(*made)[0] == 0
    behind[4] = root / "deep"
    short = ["--steps", 2, "--warmup", 1]
    said = f"wrote {root / 'exits' / 'head'}\n"
    assert run(*behind, *small, *short, *watched) == (0, said, "")
    *_, last = map(json.loads, (root / "exits" / "metrics.jsonl").read_text().splitlines())
    assert len(last["engine"]["acceptance"]) == 1
    evaluated = ["evaluate", "--head", out / "head", "--prompts", prompts]
    code, shown, err = run(*evaluated, "--model", root / "model", "--max-tokens", 4)
    assert (code, err) == (0, "")
    assert shown.splitlines()[0].startswith("8 prompts, ")
    assert [line.split()[0] for line in shown.splitlines()[4:]] == ["1", "2", "3", "4"]
    narrow = ["--hidden-size", 8, "--heads", 2, "--kv-heads", 1, "--mlp-size", 8, "--others", 9]
    short = ["--steps", 2, "--warmup", 1]
    distilled = ["draft", "--states", states, "--out", root / "draft", *small, *short, *narrow]
    assert run(*distilled, *watched) == (0, f"wrote {root / 'draft' / 'model'}\n", "")
    *_, last = map(json.loads, (root / "draft" / "metrics.jsonl").read_text().splitlines())
    assert last["engine"]["length"] >= 1
    skipping = ["layerskip", "--text", text, "--out", root / "skip", *small[:4], *short]
    exits = ["--eval-exit", 1, *watched]
    assert run(*skipping, *exits) == (0, f"wrote {root / 'skip' / 'model'}\n", "")
    *_, last = map(json.loads, (root / "skip" / "metrics.jsonl").read_text().splitlines())
    assert last["engine"]["length"] >= 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["states", "--text", "/no/text", "--out", "x"], "error: /no/text: no settings.json"),
        (["head", "--states", "/no/states", "--out", "x"], "error: /no/states: no settings.json"),
        (["text", "--prompts", "/no/file", "--out", "x"], "error: /no/file: No such file"),
        (
            ["head", "--states", "s", "--out", "x", "--batch-tokens", "9"],
            "error: a batch of 9 tokens is smaller than a row of 512",
        ),
        (["head", "--states", "s", "--out", "x", "--mesh", "model=2"], "error: mesh 'model=2'"),
        (["head", "--states", "s", "--out", "x", "--family", "hydra"], "Usage"),
        (
            ["exits", "--states", "s", "--out", "x", "--layers", "2,last"],
            "error: layers '2,last': give numbers of layers, as 4,8,12",
        ),
        (["draft", "--states", "/no/states", "--out", "x"], "error: /no/states: no settings.json"),
        (["layerskip", "--text", "/no/text", "--out", "x"], "error: /no/text: no settings.json"),
        (["layerskip", "--text", "t", "--out", "x", "--dropout", "1"], "error: dropout is 1.0"),
        (["head", "--wrong"], "Usage"),
        (["head"], "Usage"),
    ],
)
def test_mistakes_are_short(run, args, message):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert 1 <= len(err.splitlines()) <= 5


def test_without_the_extra_there_is_one_clear_line(run, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "grain" else found(name)
    )
    assert run("head", "--states", "s", "--out", "x") == (
        2,
        "",
        "error: jspec train needs grain: pip install 'jspec-decoding[train]'\n",
    )
