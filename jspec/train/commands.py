"""`jspec train`: text, states, head, exits, evaluate; whole models stand in `model_commands`.
Parses, calls the library, prints.

Everything heavy is imported inside the commands, as in `jspec.cli`.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from jspec.config import DEFAULT_MODEL
from jspec.errors import JspecError

if TYPE_CHECKING:
    from jspec.terminal import Steps
    from jspec.train.evaluate import Acceptance
    from jspec.train.settings import Settings, Watching
    from jspec.train.states import TargetOfText

_EXTRA = ("optax", "grain", "matplotlib")

app = typer.Typer(
    help="Train what drafts on the target's own text (needs the extra train).",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class HeadFamily(enum.StrEnum):
    """What can be trained."""

    mtp = "mtp"
    eagle = "eagle"
    eagle3 = "eagle3"
    medusa = "medusa"


class ComputeType(enum.StrEnum):
    """Type of activations and products."""

    bfloat16 = "bfloat16"
    float32 = "float32"


Prompts = Annotated[Path, typer.Option(help="Questions in the format of Spec-Bench (jsonl).")]
Model = Annotated[
    str | None, typer.Option(help="A packaged name, a local folder, a hub id or a GGUF file.")
]
Out = Annotated[Path, typer.Option(help="Folder to write to; an unfinished one is gone on with.")]
BatchTokens = Annotated[int, typer.Option(help="Tokens of a batch.")]
SequenceLength = Annotated[int, typer.Option(help="Tokens of one of its rows.")]
LearningRate = Annotated[float, typer.Option(help="At its peak.")]
Warmup = Annotated[int, typer.Option(help="Steps until there.")]
DraftVocabSize = Annotated[int, typer.Option(help="Tokens that the head knows, the most frequent.")]
Unroll = Annotated[int, typer.Option(help="Draft steps rehearsed; the number of Medusa's heads.")]
HiddenLoss = Annotated[
    float, typer.Option(help="Weight of carrying the target's hidden state (mtp, eagle).")
]
LogitLoss = Annotated[float, typer.Option(help="Weight of saying what the target says.")]
Norms = Annotated[bool, typer.Option(help="Of mtp; without them it is EAGLE's first architecture.")]
PromptsToo = Annotated[
    bool, typer.Option("--prompts-too", help="Learn from prompts as well as from answers.")
]
EvalPrompts = Annotated[
    Path | None, typer.Option(help="Questions to evaluate on with the engine as well.")
]
EvalTokens = Annotated[int, typer.Option(min=1, help="Tokens of their answers.")]
States = Annotated[
    list[Path], typer.Option(help="Folder of jspec train states; repeat for several.")
]
TrainSteps = Annotated[int, typer.Option("--steps", help="Batches to learn from.")]
Seed = Annotated[int, typer.Option(help="Same seed, same outcome.")]
Dtype = Annotated[ComputeType, typer.Option(help="Of activations.")]
MeshOption = Annotated[str | None, typer.Option("--mesh", help="To share a batch, as data=2.")]
LogEvery = Annotated[int, typer.Option(help="Steps a line of metrics.")]
EvalEvery = Annotated[int, typer.Option(help="Steps between evaluations.")]
CheckpointEvery = Annotated[int, typer.Option(help="Steps between checkpoints.")]


@app.command()
def text(
    prompts: Prompts,
    out: Out,
    model: Annotated[str, typer.Option(help="The target.")] = DEFAULT_MODEL,
    rows: Annotated[int, typer.Option(min=1, help="Prompts answered together: a shard.")] = 64,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Repeat for several, a shard each in turn.  [default: 0, 0, 0.7]"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 256,
    max_length: Annotated[int, typer.Option(help="Leave out prompts that need more.")] = 512,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
) -> None:
    """Let the target answer prompts: what it says is what heads learn from."""
    need_extra()
    from jspec import benchmark, terminal

    questions = benchmark.load_prompts(prompts)
    with terminal.Steps() as steps, terminal.sure_interrupt(steps):
        steps.update("starting", 0, 0)
        from jspec.llm import LLM, enable_compilation_cache
        from jspec.train.evaluate import chat_prompts
        from jspec.train.text import write_text

        enable_compilation_cache()
        llm = LLM(
            model,
            drafter="none",
            max_num_seqs=rows,
            batch_sizes=(rows,),
            block_widths=(1,),
            progress=steps.update,
            report=steps.say,
        )
        ids = chat_prompts(llm, [q.text for q in questions], room=max_tokens, longest=max_length)
        steps.update("starting", 1, 1)
        write_text(
            llm,
            ids,
            out,
            shard_size=rows,
            temperatures=temperature or (0.0, 0.0, 0.7),
            max_tokens=max_tokens,
            seed=seed,
            settings={"model": model, "prompts": prompts.name},
            progress=steps.update,
        )
    print(f"answered {len(ids)} prompts in {out}")


@app.command()
def states(
    text: Annotated[Path, typer.Option(help="Folder of jspec train text.")],
    out: Out,
    taps: Annotated[
        str, typer.Option(help="final, eagle3, all, or layers as 2,15: what heads will read.")
    ] = "final",
    model: Model = None,
    dtype: Annotated[
        ComputeType, typer.Option(help="Type that the target computes in.")
    ] = ComputeType.bfloat16,
) -> None:
    """Compute the target's hidden states over its text; run again when there is more text."""
    need_extra()
    from jspec import terminal

    with terminal.Steps() as steps, terminal.sure_interrupt(steps):
        steps.update("starting", 0, 0)
        from jspec.train.states import parse_taps, write_states
        from jspec.train.text import text_shards

        name = model or _model_of(text, text_shards(text).settings())
        target, _ = _load_target(name, dtype.value, steps)
        chosen = parse_taps(taps, target.config.num_hidden_layers)
        steps.update("starting", 1, 1)
        added = write_states(target, text, out, taps=chosen, progress=steps.update)
    print(f"added {added} shards to {out}")


@app.command()
def head(
    states: States,
    out: Out,
    family: Annotated[HeadFamily, typer.Option(help="What kind of head.")] = HeadFamily.mtp,
    steps: TrainSteps = 1000,
    batch_tokens: BatchTokens = 4096,
    sequence_length: SequenceLength = 512,
    learning_rate: LearningRate = 1e-3,
    warmup: Warmup = 100,
    draft_vocab_size: DraftVocabSize = 8192,
    unroll: Unroll = 3,
    hidden_loss: HiddenLoss = 0.1,
    logit_loss: LogitLoss = 1.0,
    norms: Norms = True,
    prompts_too: PromptsToo = False,
    seed: Seed = 0,
    dtype: Dtype = ComputeType.bfloat16,
    model: Model = None,
    mesh: MeshOption = None,
    log_every: LogEvery = 20,
    eval_every: EvalEvery = 200,
    checkpoint_every: CheckpointEvery = 200,
    eval_prompts: EvalPrompts = None,
    eval_tokens: EvalTokens = 128,
) -> None:
    """Train a head on states; run again to go on with a training that was stopped."""
    need_extra()
    from jspec.train.settings import Settings, Watching

    settings = Settings(
        family=family.value,
        steps=steps,
        batch_tokens=batch_tokens,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        warmup=warmup,
        draft_vocab_size=draft_vocab_size,
        unroll=unroll,
        hidden_loss=hidden_loss,
        logit_loss=logit_loss,
        norms=norms,
        prompts_too=prompts_too,
        seed=seed,
        dtype=dtype.value,
    )
    watching = Watching(log_every, eval_every, checkpoint_every, None, data_parallel(mesh))
    _train_head(states, out, settings, watching, model, Evaluation(eval_prompts, eval_tokens))


@app.command()
def exits(
    states: States,
    out: Out,
    layers: Annotated[
        str, typer.Option(help="Layers of the target before each exit, as 4,8,12; taps of STATES.")
    ],
    steps: TrainSteps = 1000,
    batch_tokens: BatchTokens = 4096,
    sequence_length: SequenceLength = 512,
    learning_rate: LearningRate = 1e-3,
    warmup: Warmup = 100,
    draft_vocab_size: DraftVocabSize = 8192,
    prompts_too: PromptsToo = False,
    seed: Seed = 0,
    dtype: Dtype = ComputeType.bfloat16,
    model: Model = None,
    mesh: MeshOption = None,
    log_every: LogEvery = 20,
    eval_every: EvalEvery = 200,
    checkpoint_every: CheckpointEvery = 200,
    eval_prompts: EvalPrompts = None,
    eval_tokens: EvalTokens = 128,
) -> None:
    """Train exits behind layers of the target, all at once; run again to go on."""
    need_extra()
    from jspec.train.settings import Settings, Watching

    settings = Settings(
        family="exits",
        layers=_layers(layers),
        steps=steps,
        batch_tokens=batch_tokens,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        warmup=warmup,
        draft_vocab_size=draft_vocab_size,
        prompts_too=prompts_too,
        seed=seed,
        dtype=dtype.value,
    )
    watching = Watching(log_every, eval_every, checkpoint_every, None, data_parallel(mesh))
    _train_head(states, out, settings, watching, model, Evaluation(eval_prompts, eval_tokens))


class Evaluation(NamedTuple):
    """What the engine is to make of what is being trained."""

    prompts: Path | None
    """None: nothing."""
    max_tokens: int
    exit_layer: int | None = None
    """Behind this layer of what is trained; None: it drafts for the target that it came of."""


def _train_head(
    states: Sequence[Path],
    out: Path,
    settings: Settings,
    watching: Watching,
    model: str | None,
    evaluation: Evaluation,
) -> None:
    def train(target: TargetOfText, tokenizer: Any, watching: Watching) -> None:
        from jspec.train import trainer

        trainer.train(target, states, out, settings, watching)

    run_training(states[0], model, watching, evaluation, train)
    print(f"wrote {out / 'head'}")


def run_training(
    source: Path,
    model: str | None,
    watching: Watching,
    evaluation: Evaluation,
    train: Callable[[TargetOfText, Any, Watching], None],
) -> None:
    """Calls `train` with the target whose text or states are in `source` (or `model`), its
    tokenizer and what shows and evaluates the run."""
    from jspec import benchmark, terminal

    asked = evaluation.prompts
    questions = benchmark.load_prompts(asked) if asked is not None else []
    with terminal.Steps() as bars, terminal.sure_interrupt(bars):
        bars.update("starting", 0, 0)
        from jspec.train.evaluate import evaluator_of
        from jspec.train.states import state_shards

        made = state_shards(source).settings()
        name = model or _model_of(source, made)
        target, tokenizer = _load_target(name, made.get("computed_in", "bfloat16"), bars)
        texts = [question.text for question in questions]
        watching = dataclasses.replace(
            watching,
            evaluator=evaluator_of(
                target, tokenizer, texts, evaluation.max_tokens, exit_layer=evaluation.exit_layer
            ),
            progress=bars.update,
            report=bars.say,
        )
        bars.update("starting", 1, 1)
        train(target, tokenizer, watching)


@app.command()
def evaluate(
    head: Annotated[str, typer.Option(help="A head, or anything else that drafts.")],
    prompts: Prompts,
    model: Annotated[str, typer.Option(help="The target.")] = DEFAULT_MODEL,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--num-speculative-tokens", "-k", min=1, help="Tokens a draft.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts a category.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """How many drafts the engine accepts, by their position."""
    need_extra()
    from jspec import benchmark, terminal

    questions = benchmark.select_prompts(benchmark.load_prompts(prompts), limit=limit)
    with terminal.Steps() as steps, terminal.sure_interrupt(steps):
        steps.update("starting", 0, 0)
        from jspec.llm import LLM, enable_compilation_cache
        from jspec.train.evaluate import chat_prompts, evaluate

        enable_compilation_cache()
        llm = LLM(
            model,
            drafter=head,
            num_speculative_tokens=num_speculative_tokens,
            progress=steps.update,
            report=steps.say,
        )
        room = max_tokens + llm.drafter.num_speculative_tokens
        texts = [question.text for question in questions]
        asked = chat_prompts(llm, texts, room=room, longest=llm.max_model_len)
        steps.update("starting", 1, 1)
        found = evaluate(llm, asked, max_tokens, temperature=temperature, progress=steps.update)
    print("\n".join(table(found)))


def table(found: Acceptance) -> list[str]:
    """Lines of at most 80 columns."""
    lines = [
        f"{found.num_prompts} prompts, {found.num_tokens} tokens, {found.num_rounds} rounds",
        f"mean acceptance length {found.mean_length:.2f}",
        "",
        "position  accepted",
    ]
    shares = enumerate(found.per_position, 1)
    return lines + [f"{position:8}  {share:8.3f}" for position, share in shares]


def need_extra() -> None:
    """Raises JspecError where what only training needs is not installed."""
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise JspecError(
            f"jspec train needs {', '.join(missing)}: pip install 'jspec-decoding[train]'"
        )


def _model_of(folder: Path, settings: dict[str, Any]) -> str:
    if "model" not in settings:
        raise JspecError(f"{folder} does not say whose it is: give --model")
    return settings["model"]


def _load_target(name: str, dtype: str, steps: Steps) -> tuple[TargetOfText, Any]:
    """The model and its tokenizer."""
    import checkpoints
    from jspec.llm import enable_compilation_cache
    from jspec.train.states import TargetOfText

    enable_compilation_cache()
    loaded = checkpoints.load(name, dtype=dtype, progress=steps.update, report=steps.say)
    return TargetOfText(name, loaded.config, loaded.params), loaded.tokenizer


def _layers(text: str) -> tuple[int, ...]:
    """Of `4,8,12`, ascending."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise JspecError(f"layers {text!r}: give numbers of layers, as 4,8,12")
    return tuple(sorted({int(part) for part in parts}))


def data_parallel(mesh: str | None) -> int:
    """Of `data=2`."""
    if mesh is None:
        return 1
    axis, _, size = mesh.partition("=")
    if axis != "data" or not size.isdecimal():
        raise JspecError(f"mesh {mesh!r}: give the number of devices as data=2")
    return int(size)
