"""The `jspec` command: generate, convert, bench, train. Parses, calls the library, prints.

Everything heavy (JAX, transformers, rich) is imported inside the commands, so that help and a
wrong flag answer at once.
"""

from __future__ import annotations

import enum
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jspec.config import DEFAULT_MODEL
from jspec.errors import JspecError
from jspec.train import commands, model_commands


class DType(enum.StrEnum):
    """Type of weights and activations."""

    bfloat16 = "bfloat16"
    float32 = "float32"
    float16 = "float16"


class Verification(enum.StrEnum):
    """Which rule decides on the drafts; the output law is the target's under both."""

    rejection = "rejection"
    coupled = "coupled"


class Suite(enum.StrEnum):
    """Comparisons that choose their drafters themselves."""

    hierarchy = "hierarchy"


class _Commands(TyperGroup):
    """Runs a command; see `terminal.tidy_exit` for what becomes of its errors."""

    def invoke(self, ctx: Any) -> Any:
        from jspec import terminal

        with terminal.tidy_exit():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    help="Speculative decoding in JAX: faster generation, the output law unchanged.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(commands.app, name="train")
commands.app.command()(model_commands.draft)
commands.app.command()(model_commands.layerskip)

Model = Annotated[
    str, typer.Option(help="A packaged name, a local folder, a hub id or a GGUF file.")
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        min=1,
        help="Tokens drafted a round, or a tree's depth.  [default: what suits the drafter]",
    ),
]
TreeNodes = Annotated[
    int | None,
    typer.Option(min=1, help="Draft trees of this many tokens (trained heads).  [default: chains]"),
]
TreeWidth = Annotated[int, typer.Option(min=1, help="Nodes of a tree that grow on each level.")]
ComputeType = Annotated[DType, typer.Option(help="Type of weights and activations.")]


def main() -> None:
    """Entry point of the console script."""
    from jspec import terminal

    terminal.quiet_libraries()
    terminal.tolerate_any_text()
    app(prog_name="jspec")


def _version(wanted: bool) -> None:
    if wanted:
        print("jspec", importlib.metadata.version("jspec-decoding"))
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: Model = DEFAULT_MODEL,
    drafter: Annotated[
        str, typer.Option(help="ngram, none, a trained head, a second model; auto: what suits.")
    ] = "auto",
    num_speculative_tokens: NumSpeculativeTokens = None,
    tree_nodes: TreeNodes = None,
    tree_width: TreeWidth = 4,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least share of the top probability.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: what was said is less likely.")
    ] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Taken from said tokens' logits.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, each time said.")] = 0.0,
    min_tokens: Annotated[int, typer.Option(help="Nothing stops the text before.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; repeat for several.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    verification: Annotated[
        Verification, typer.Option(help="Rule that accepts drafts.")
    ] = Verification.rejection,
    dtype: ComputeType = DType.bfloat16,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the bare prompt: no chat.")] = False,
) -> None:
    """Generate text; it streams to stdout, with one line of figures under it."""
    from jspec import terminal

    text = _read_prompt(prompt)
    with terminal.Steps() as steps, terminal.sure_interrupt(steps):
        steps.update("starting", 0, 0)
        from jspec import drafter_loading
        from jspec.llm import LLM, SamplingParams, enable_compilation_cache

        # Before the model, so that a wrong value does not wait for a download.
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=stop or (),
            seed=seed,
            verification=verification.value,
        )
        enable_compilation_cache()
        llm = LLM(
            model,
            drafter=drafter,
            num_speculative_tokens=num_speculative_tokens,
            tree=drafter_loading.dynamic_tree(num_speculative_tokens, tree_width, tree_nodes),
            dtype=dtype.value,
            progress=steps.update,
            report=steps.say,
        )
        steps.update("starting", 1, 1)
        out, output = terminal.TextOut(), None
        for chunk in llm.stream(text if raw else [{"role": "user", "content": text}], params):
            steps.close()
            out.write(chunk.text)
            output = chunk.output
        out.end()
    if output is not None:
        terminal.show_figures(terminal.figures_line(output.metrics, llm.drafter.name))


def _read_prompt(prompt: str) -> str:
    if prompt == "-":
        if sys.stdin is None:
            raise JspecError("the prompt is -, but there is no standard input")
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise JspecError(f"standard input is not text: {error}") from None
    if not prompt.strip():
        raise JspecError("the prompt is empty")
    return prompt


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A local folder, a hub id or a GGUF file.")],
    dest: Annotated[Path, typer.Argument(help="Folder to write the checkpoint to.")],
    dtype: Annotated[DType | None, typer.Option(help="Default: as in the source.")] = None,
) -> None:
    """Convert a checkpoint once, to load faster and onto any mesh."""
    from jspec import terminal

    with terminal.Steps() as steps, terminal.sure_interrupt(steps):
        steps.update("starting", 0, 0)
        import checkpoints

        checkpoints.convert(
            source,
            dest,
            dtype=dtype.value if dtype else None,
            progress=steps.update,
            report=steps.say,
        )
    print(f"wrote {dest}")


@app.command()
def bench(
    prompts: Annotated[Path, typer.Option(help="Questions in the format of Spec-Bench (jsonl).")],
    drafter: Annotated[
        list[str] | None, typer.Option(help="Repeat to compare several.  [default: ngram]")
    ] = None,
    model: Model = DEFAULT_MODEL,
    num_speculative_tokens: NumSpeculativeTokens = None,
    tree_nodes: TreeNodes = None,
    tree_width: TreeWidth = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate a prompt.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts a category.")] = None,
    categories: Annotated[str | None, typer.Option(help="Only these, as a,b.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each prompt.")] = 1,
    dtype: ComputeType = DType.bfloat16,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write every figure to this file.")
    ] = None,
    peer: Annotated[
        str | None, typer.Option(help="Command of another engine to time in turn with this one.")
    ] = None,
    suite: Annotated[
        Suite | None,
        typer.Option(help="hierarchy: early exits, cascades and their relatives, chosen here."),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Of a suite.")] = "1,2,4,8,16",
) -> None:
    """Time drafters against plain decoding, prompt by prompt in turn."""
    from jspec import benchmark, terminal

    if json_out is not None:
        _check_writable(json_out)
    if suite is not None:
        options = {"model": model, "dtype": dtype.value, "max_tokens": max_tokens, "limit": limit}
        _bench_hierarchy(prompts, _numbers("--batch-sizes", batch_sizes), options, json_out)
        return
    settings = benchmark.Settings(
        prompts=str(prompts),
        model=model,
        drafters=tuple(drafter or ["ngram"]),
        num_speculative_tokens=num_speculative_tokens,
        tree_nodes=tree_nodes,
        tree_width=tree_width,
        dtype=dtype.value,
        max_tokens=max_tokens,
        repeats=repeats,
        limit=limit,
        categories=tuple(categories.split(",")) if categories else (),
        peer=peer,
    )
    questions = benchmark.select_prompts(
        benchmark.load_prompts(prompts), settings.categories, settings.limit
    )
    with terminal.Steps() as steps:
        with terminal.sure_interrupt(steps):
            engines = benchmark.load_engines(settings, steps.update)
        report = benchmark.run(settings, questions, engines, steps.update)
    terminal.print_report(report)
    if json_out is not None:
        benchmark.write_json(report, json_out)
    if report.stopped_by is not None:
        raise report.stopped_by


def _bench_hierarchy(
    prompts: Path, batch_sizes: tuple[int, ...], options: dict[str, Any], json_out: Path | None
) -> None:
    from jspec import benchmark, terminal

    questions = benchmark.select_prompts(benchmark.load_prompts(prompts), limit=options["limit"])
    with terminal.Steps() as steps:
        with terminal.sure_interrupt(steps):
            steps.update("starting", 0, 0)
            from jspec import hierarchy, hierarchy_table

        settings = hierarchy.Settings(str(prompts), batch_sizes=batch_sizes, **options)
        report = hierarchy.run(settings, questions, steps.update)
    hierarchy_table.print_report(report)
    if json_out is not None:
        hierarchy.write_json(report, json_out)
    if report.stopped_by is not None:
        raise report.stopped_by


@app.command()
def calibrate(
    prompts: Annotated[Path, typer.Option(help="Questions in the format of Spec-Bench (jsonl).")],
    model: Model = DEFAULT_MODEL,
    exits: Annotated[
        str | None,
        typer.Option(help="Trained exits; own: the model's own norm and output head."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts to answer.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 96,
    dtype: ComputeType = DType.bfloat16,
) -> None:
    """Choose early exits, their K and window for this model on this machine."""
    from jspec import benchmark, terminal

    questions = benchmark.load_prompts(prompts)
    chosen = questions[:: max(1, len(questions) // limit)][:limit]
    with terminal.Steps() as steps, terminal.sure_interrupt(steps):
        steps.update("starting", 0, 0)
        from jspec import calibrate, hierarchy, hierarchy_table
        from jspec.llm import LLM, enable_compilation_cache

        enable_compilation_cache()
        llm = LLM(model, drafter="none", dtype=dtype.value, progress=steps.update)
        ids = [llm.chat_prompt([{"role": "user", "content": q.text}]) for q in chosen]
        found = calibrate.calibrate(
            llm, ids, exits=exits, max_tokens=max_tokens, progress=steps.update
        )
    hierarchy_table.print_choice(hierarchy.best_plans(found), found)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Of `1,2,4`."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise JspecError(f"{option} {text!r}: give numbers from 1 up, as 1,4,16")
    return tuple(sorted({int(part) for part in parts}))


def _check_writable(path: Path) -> None:
    """Finds out before a long run that its figures cannot be written."""
    if path.is_dir():
        raise JspecError(f"{path} is a folder, not a file to write figures to")
    if not path.parent.is_dir():
        raise JspecError(f"{path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise JspecError(f"{path}: no permission to write")


if __name__ == "__main__":
    main()
