"""The command line, with a fake engine in place of `jspec.llm`.

Run as a script, this file is the `jspec` command with that engine: what the process tests start.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jspec import cli, terminal
from jspec.errors import JspecError
from jspec.metrics import Metrics

METRICS = Metrics(
    num_prompt_tokens=9,
    num_tokens=12,
    num_rounds=6,
    drafted_per_position=(6, 4),
    accepted_per_position=(4, 2),
    decode_seconds=0.5,
)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    max_tokens: int = 256
    seed: int | None = None
    verification: str = "rejection"

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise JspecError(f"top_p is {self.top_p}: it must be over 0 and at most 1")


class LLM:
    """Answers every prompt with its own words; model names choose how it misbehaves."""

    def __init__(self, model, *, drafter, progress, **options):
        if model == "missing":
            raise JspecError("no model 'missing'\nsecond line")
        if model == "unreadable":
            Path("/no/such/folder/weights").read_bytes()
        if model == "defect":
            raise RuntimeError("a defect of ours")
        if model in ("deaf", "alarmist"):
            self._wait(model)
        progress("loading", 1, 2)
        progress("loading", 2, 2)
        self.model, self.params, self.tokenizer = model, ("weights", ()), None
        self.drafter = types.SimpleNamespace(name=drafter)

    def _wait(self, model):
        """Interrupted while loading, as libraries take it: not at all, or for a bad file."""
        print("waiting", flush=True)
        while True:
            try:
                time.sleep(60)
            except KeyboardInterrupt as error:
                print("a trace", file=sys.stderr)
                if model == "alarmist":
                    raise JspecError("damaged checkpoint") from error

    def chat_prompt(self, messages):
        return list(range(len(messages[0]["content"])))

    def stream(self, prompt, params):
        words = prompt if isinstance(prompt, str) else f"chat: {prompt[0]['content']}"
        pieces = [f"{word} " for word in words.split()]
        for piece in pieces * (100_000 if self.model == "endless" else 1):
            if self.model == "endless":
                time.sleep(0.01)
            yield types.SimpleNamespace(text=piece, output=None)
        output = types.SimpleNamespace(metrics=METRICS)
        yield types.SimpleNamespace(text="end", output=output)

    def generate(self, prompts, params):
        if self.model == "endless":
            print("generating", flush=True)
            time.sleep(0.01)
        fast = self.drafter.name != "none"
        metrics = dataclasses.replace(METRICS, decode_seconds=0.25 if fast else 0.5)
        if not fast:
            metrics = dataclasses.replace(metrics, drafted_per_position=(), num_rounds=12)
            metrics = dataclasses.replace(metrics, accepted_per_position=())
        return [types.SimpleNamespace(token_ids=[1, 2, 3], metrics=metrics)]

    def measure_round(self, context_length, *, repeats):
        return types.SimpleNamespace(
            plain_seconds=0.02, verify_seconds=0.02, draft_seconds=0.0, plain_width=2
        )


def enable_compilation_cache(path=None) -> None:
    pass


@pytest.fixture
def run(monkeypatch):
    """Runs the command in this process; gives its exit code, stdout and stderr."""
    monkeypatch.setitem(sys.modules, "jspec.llm", sys.modules[__name__])
    runner = CliRunner()
    return lambda *args, **kwargs: runner.invoke(cli.app, args, prog_name="jspec", **kwargs)


def spawn(*args: str, **kwargs) -> subprocess.Popen:
    """The command in a process of its own, with the fake engine."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, __file__, *args], **{**pipes, **kwargs})


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    entries = [
        {"question_id": i, "category": "a_rather_long_category_name", "turns": ["x" * 70]}
        for i in range(3)
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


FIGURES = "12 tokens, 24.0 tokens/s, auto: 60% accepted, mean length 2.00\n"


def test_generate_separates_text_and_figures(run):
    result = run("generate", "hello there")
    assert (result.exit_code, result.stdout) == (0, "chat: hello there end\n")
    assert result.stderr == FIGURES


def test_generate_raw_from_stdin(run):
    result = run("generate", "-", "--raw", input="bare words")
    assert (result.exit_code, result.stdout) == (0, "bare words end\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["hi", "--model", "missing"], "error: no model 'missing' second line\n"),
        (["hi", "--top-p", "2"], "error: top_p is 2.0: it must be over 0 and at most 1\n"),
        (
            ["hi", "--model", "unreadable"],
            "error: /no/such/folder/weights: No such file or directory\n",
        ),
        ([" "], "error: the prompt is empty\n"),
        (["-"], "error: the prompt is empty\n"),
    ],
)
def test_mistakes_are_one_line(run, args, message):
    result = run("generate", *args)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", message)


def test_a_defect_keeps_its_trace(run):
    result = run("generate", "hi", "--model", "defect")
    assert isinstance(result.exception, RuntimeError)


@pytest.mark.parametrize("args", [["--wrong"], ["generate"], ["generate", "hi", "--dtype", "int8"]])
def test_wrong_usage_is_short(run, args):
    result = run(*args)
    assert result.exit_code == 2
    assert 1 <= len(result.stderr.splitlines()) <= 4


def test_convert_names_what_it_wrote(run, monkeypatch, tmp_path):
    calls = []

    def convert(source, dest, **options):
        options["report"]("skipped one tensor")
        calls.append((source, dest, options["dtype"]))

    monkeypatch.setattr(importlib.import_module("checkpoints"), "convert", convert, raising=False)
    result = run("convert", "somewhere", str(tmp_path), "--dtype", "float32")
    assert result.exit_code == 0
    assert calls == [("somewhere", tmp_path, "float32")]
    assert result.stdout == f"wrote {tmp_path}\n"
    assert result.stderr == "skipped one tensor\n"


def test_bench_table_fits_and_json_is_whole(run, prompts, tmp_path):
    target = tmp_path / "out.json"
    result = run("bench", "--prompts", str(prompts), "--json", str(target), "--limit", "2")
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    overall = next(line for line in result.stdout.splitlines() if "overall" in line)
    assert " ".join(overall.split()) == "overall 24.0 48.0 2.00x 2.00x 0.60 2.00 2/2"
    assert "engine efficiency 1.00 of a possible 2.00x" in result.stdout
    report = json.loads(target.read_text())
    assert report["complete"] is True
    assert report["comparisons"]["ngram"][-1]["speedup"] == 2.0
    assert report["environment"]["cores"] >= 1
    assert len(report["runs"]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "/no/file"], "error: /no/file: No such file or directory\n"),
        (["--json", "/no/folder/x.json"], "error: /no/folder/x.json: there is no folder"),
        (["--json", "/"], "error: / is a folder"),
        (["--categories", "poetry"], "error: no category 'poetry'; there are a_rather_long"),
        (["--peer", "/no/such/engine"], "error: peer '/no/such/engine' does not start"),
        (["--limit", "0"], "Usage"),
    ],
)
def test_bench_mistakes(run, prompts, options, message):
    if "--prompts" not in options:
        options = ["--prompts", str(prompts), *options]
    result = run("bench", *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)


def test_interrupted_bench_keeps_what_is_done(prompts, tmp_path):
    target = tmp_path / "out.json"
    arguments = ["--prompts", str(prompts), "--json", str(target), "--repeats", "1000"]
    process = spawn("bench", "--model", "endless", *arguments)
    assert process.stdout is not None
    for _ in range(12):  # enough to be past the warm-up
        assert process.stdout.readline() == "generating\n"
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, err) == (130, "\n")
    assert "not complete: stopped after" in out
    assert json.loads(target.read_text())["complete"] is False


def test_interrupt_ends_without_a_trace():
    process = spawn("generate", "hello", "--model", "endless")
    assert process.stdout is not None
    assert process.stdout.read(5) == "chat:"
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, err) == (130, "\n")


@pytest.mark.parametrize("model", ["deaf", "alarmist"])
@pytest.mark.parametrize("command", [["generate", "hi"], ["bench", "--prompts", "PROMPTS"]])
def test_interrupt_while_loading_is_sure(prompts, command, model):
    arguments = [str(prompts) if a == "PROMPTS" else a for a in command]
    process = spawn(*arguments, "--model", model)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, err) == (130, "\n")


def test_interrupt_gives_the_cursor_back():
    shown = on_terminal("generate", "hi", "--model", "deaf", interrupt_at=b"waiting", code=130)
    assert shown.count("\x1b[?25l") == 1
    assert shown.endswith("\x1b[?25h\r\x1b[1A\x1b[2K\r\n")


def test_closed_pipe_is_quiet():
    process = spawn("generate", "hello", "--model", "endless")
    assert process.stdout is not None
    assert process.stdout.read(5) == "chat:"
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141


def test_text_that_the_encoding_lacks():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    code, out, _ = finish(
        spawn("generate", "caf\N{LATIN SMALL LETTER E WITH ACUTE}", env=environment)
    )
    assert (code, out) == (0, "chat: caf? end\n")


def on_terminal(*args: str, interrupt_at: bytes | None = None, code: int = 0) -> str:
    """Everything the command writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "NO_COLOR": ""}
    environment.pop("NO_COLOR")
    process = spawn(*args, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    text = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # what a terminal says when its last user has gone
            break
        text += piece
        if interrupt_at is not None and interrupt_at in text:
            process.send_signal(signal.SIGINT)
            interrupt_at = None
    os.close(ours)
    assert process.wait(timeout=60) == code
    return text.decode()


def test_terminal_shows_text_and_dim_figures_and_gets_its_cursor_back():
    shown = on_terminal("generate", "hello \x1b[31mred")
    text = shown[shown.rindex("chat:") :]
    assert text == f"chat: hello [31mred end\r\n\x1b[2m{FIGURES[:-1]}\x1b[0m\r\n"
    assert "starting" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_help_is_fast_and_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['jspec', '--help']\n"
        "from jspec.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'jax', 'flax', 'numpy', 'transformers'} & set(sys.modules)))"
    )

    def run_help() -> tuple[float, str]:
        start = time.perf_counter()
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return time.perf_counter() - start, result.stdout

    runs = [run_help() for _ in range(3)]
    assert [shown.splitlines()[-1] for _, shown in runs] == ["[]"] * 3
    assert min(runs)[0] < 0.5  # the best: other work may hold the cores


@pytest.mark.parametrize(
    "drafter", ["ngram", "/a/very/long/path/to/some/folder/with/a/draft-model"]
)
def test_figures_fit_a_narrow_terminal(drafter):
    metrics = dataclasses.replace(METRICS, num_tokens=10_000, decode_seconds=10.0)
    line = terminal.figures_line(metrics, drafter)
    assert len(line) <= 80
    assert line.startswith("10000 tokens, 1000.0 tokens/s, ")
    assert drafter[-5:] in line


def test_figures_of_plain_decoding_have_no_acceptance():
    metrics = Metrics(num_tokens=10, num_rounds=10, decode_seconds=1.0)
    assert terminal.figures_line(metrics, "none") == "10 tokens, 10.0 tokens/s, no drafts"


if __name__ == "__main__":
    # A shell that starts the tests in its background leaves Ctrl-C ignored in all below it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["jspec.llm"] = sys.modules["__main__"]
    cli.main()
