"""`jspec train draft` and `jspec train layerskip`: whole models. As `jspec.train.commands`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jspec.train.commands import (
    BatchTokens,
    CheckpointEvery,
    ComputeType,
    Dtype,
    EvalEvery,
    EvalPrompts,
    EvalTokens,
    Evaluation,
    LearningRate,
    LogEvery,
    MeshOption,
    Model,
    Out,
    PromptsToo,
    Seed,
    SequenceLength,
    States,
    TrainSteps,
    Warmup,
    data_parallel,
    need_extra,
    run_training,
)

if TYPE_CHECKING:
    from jspec.train.settings import Watching
    from jspec.train.states import TargetOfText

Frequent = Annotated[int, typer.Option(help="Tokens that every step looks at, the most frequent.")]
Others = Annotated[int, typer.Option(help="Of all others, how many a step looks at, in turn.")]


def draft(
    states: States,
    out: Out,
    hidden_size: Annotated[int, typer.Option(help="Width of the draft model.")] = 128,
    layers: Annotated[int, typer.Option(help="Its layers.")] = 4,
    heads: Annotated[int, typer.Option(help="Their query heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Their key and value heads.")] = 2,
    mlp_size: Annotated[int, typer.Option(help="Width of their MLPs.")] = 384,
    draft_vocab_size: Frequent = 6144,
    others: Others = 2048,
    steps: TrainSteps = 1000,
    batch_tokens: BatchTokens = 4096,
    sequence_length: SequenceLength = 512,
    learning_rate: LearningRate = 3e-3,
    warmup: Warmup = 100,
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
    """Distil a small draft model from states; run again to go on with one that was stopped."""
    need_extra()
    from jspec.train.settings import DraftSettings, Watching

    settings = DraftSettings(
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        mlp_size=mlp_size,
        draft_vocab_size=draft_vocab_size,
        others=others,
        steps=steps,
        batch_tokens=batch_tokens,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        warmup=warmup,
        prompts_too=prompts_too,
        seed=seed,
        dtype=dtype.value,
    )
    watching = Watching(log_every, eval_every, checkpoint_every, None, data_parallel(mesh))

    def train(target: TargetOfText, tokenizer: Any, watching: Watching) -> None:
        from jspec.train.draft import train_draft

        train_draft(target, states, out, settings, watching, tokenizer=tokenizer)

    run_training(states[0], model, watching, Evaluation(eval_prompts, eval_tokens), train)
    print(f"wrote {out / 'model'}")


def layerskip(
    text: Annotated[
        list[Path], typer.Option(help="Folder of jspec train text; repeat for several.")
    ],
    out: Out,
    dropout: Annotated[float, typer.Option(help="How often the last layer is left out.")] = 0.1,
    exit_scale: Annotated[float, typer.Option(help="Weight of the exits before it.")] = 0.2,
    rotation: Annotated[int, typer.Option(help="One exit in so many is trained a step.")] = 4,
    steps: TrainSteps = 1000,
    batch_tokens: BatchTokens = 4096,
    sequence_length: SequenceLength = 512,
    learning_rate: LearningRate = 1e-4,
    warmup: Warmup = 100,
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
    eval_exit: Annotated[
        int, typer.Option(min=1, help="Layers that draft when the engine evaluates.")
    ] = 4,
) -> None:
    """Train a whole model on text so that its first layers draft for it (LayerSkip)."""
    need_extra()
    from jspec.train.settings import LayerSkipSettings, Watching

    settings = LayerSkipSettings(
        dropout=dropout,
        exit_scale=exit_scale,
        rotation=rotation,
        steps=steps,
        batch_tokens=batch_tokens,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        warmup=warmup,
        prompts_too=prompts_too,
        seed=seed,
        dtype=dtype.value,
    )
    watching = Watching(log_every, eval_every, checkpoint_every, None, data_parallel(mesh))

    def train(target: TargetOfText, tokenizer: Any, watching: Watching) -> None:
        from jspec.train.layerskip import train_layerskip

        train_layerskip(target, text, out, settings, watching, tokenizer=tokenizer)

    evaluation = Evaluation(eval_prompts, eval_tokens, eval_exit)
    run_training(text[0], model, watching, evaluation, train)
    print(f"wrote {out / 'model'}")
