"""`LLM`: text in, text out. The front door for Python users."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from jspec import loading
from jspec.decode import DecodeConfig, Finish
from jspec.drafters.base import Drafter
from jspec.engine.batch import BatchRunner, Progress, Request
from jspec.engine.requests import RequestOutput, SamplingParams, StreamChunk
from jspec.engine.timing import RoundTimes, measure_round
from jspec.errors import JspecError
from jspec.model import Model

if TYPE_CHECKING:
    from checkpoints import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, str]

_STREAM_BURSTS = (1, 2, 4)
"""Rounds of the first bursts of a stream, the last again and again: a quick first token, then
few host reads."""


class LLM:
    """A target model, a drafter and the compiled loop that runs them.

    Args:
      model: the packaged "smollm2-135m-instruct", a Hugging Face folder or hub id, a GGUF file,
        a folder written by `jspec convert`, a Flax NNX module (see `jspec.from_nnx`), or a
        `jspec.Model` together with `params`.
      params: parameters of a `jspec.Model`.
      tokenizer: anything with `encode(text)` and `decode(ids)`; None: the checkpoint's own.
      drafter: "ngram", "none", any model source (a draft model with the same vocabulary), or a
        `Drafter` together with `drafter_params`.
      num_speculative_tokens: K, tokens drafted a round.
      dtype: "bfloat16", "float16" or "float32", of weights, keys and values.
      max_num_seqs: rows decoded together at most; longer lists run in turns.
      max_model_len: longest prompt + output, in tokens; None: what the model's positions allow.
      batch_sizes: numbers of rows to compile for; None: powers of two up to `max_num_seqs`.
      block_widths: tokens a row that a target pass may be compiled for, the last at least K + 1;
        None: what suits the device. Bit-for-bit equality holds at one batch size and width.
      mesh: devices to shard over, axes "data" and "model".
      progress: called as (label, done, total) during long steps.
      report: called with a line about something the user should know.
    """

    def __init__(
        self,
        model: str | Path | Model | Any = "smollm2-135m-instruct",
        *,
        params: Any = None,
        tokenizer: Any = None,
        drafter: str | Path | Drafter = "ngram",
        drafter_params: Any = (),
        num_speculative_tokens: int = 6,
        dtype: str = "bfloat16",
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        batch_sizes: Sequence[int] | None = None,
        block_widths: Sequence[int] | None = None,
        mesh: Mesh | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise JspecError(f"{max_num_seqs=}: must be at least 1")
        mesh = None if mesh is None else _auto_mesh(mesh)
        options = loading.Options(dtype=dtype, mesh=mesh, progress=progress, report=report)
        target = loading.load_target(model, params, options)
        self.drafter, drafter_params = loading.load_drafter(
            drafter, drafter_params, target.model, num_speculative_tokens, options
        )
        self.model = target.model
        self.params = (target.params, drafter_params)
        self.tokenizer: Tokenizer | Any = tokenizer or target.tokenizer
        self.max_model_len = min(
            max_model_len or target.model.max_position_embeddings,
            target.model.max_position_embeddings,
        )
        self._batch_sizes = tuple(sorted(batch_sizes or _powers_of_two(max_num_seqs)))
        if self._batch_sizes[0] < 1:
            raise JspecError(f"{batch_sizes=}: each must be at least 1")
        widths = tuple(block_widths or default_widths(self.drafter.num_speculative_tokens, dtype))
        self._runner = BatchRunner(
            config=DecodeConfig(self.model, self.drafter, widths),
            params=self.params,
            dtype=jnp.dtype(dtype),
            mesh=mesh,
            on_compile=progress,
        )

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt (a text or token ids); one `SamplingParams`, or one each."""
        requests = self._requests(_as_list(prompts), sampling_params)
        outputs: list[RequestOutput] = []
        largest = self._batch_sizes[-1]
        for start in range(0, len(requests), largest):
            batch = requests[start : start + largest]
            *_, last = self._runner.run(batch, rows=self._rows(len(batch)))
            outputs += [self._output(*pair) for pair in zip(batch, last, strict=True)]
            if progress is not None:
                progress("generating", len(outputs), len(requests))
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, formatted by the model's chat template."""
        if not messages:
            raise JspecError("messages is empty: give at least one message")
        many = [messages] if isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(m) for m in many], sampling_params)  # type: ignore[arg-type]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[StreamChunk]:
        """Yields the completion of one prompt or conversation as it is made."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            prompt = self.chat_prompt(prompt)  # type: ignore[arg-type]
        (request,) = self._requests([prompt], sampling_params)  # type: ignore[list-item]
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[StreamChunk]:
        detokenizer = loading.detokenizer(self.tokenizer)
        seen = 0
        for (progress,) in self._runner.run(
            [request], rows=self._rows(1), burst_rounds=_STREAM_BURSTS
        ):
            new, seen = progress.token_ids[seen:], len(progress.token_ids)
            text = detokenizer.push(new)
            if progress.finish == Finish.RUNNING:
                yield StreamChunk(text, new)
            else:
                yield StreamChunk(text + detokenizer.flush(), new, self._output(request, progress))

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in the model's chat format, ready for its answer."""
        if not hasattr(self.tokenizer, "apply_chat_template"):
            raise JspecError("this model has no chat template: use generate with a plain prompt")
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def measure_round(self, context_length: int, *, repeats: int = 5) -> RoundTimes:
        """Times of the parts of a round after `context_length` tokens, batch 1, this machine."""
        return measure_round(
            self._runner.config, self.params, self._runner.dtype, context_length, repeats=repeats
        )

    def _rows(self, wanted: int) -> int:
        return next(size for size in self._batch_sizes if size >= wanted)

    def _requests(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        settings = sampling_params if sampling_params is not None else SamplingParams()
        if isinstance(settings, SamplingParams):
            settings = [settings] * len(prompts)
        if len(settings) != len(prompts):
            raise JspecError(f"{len(prompts)} prompts but {len(settings)} sampling_params")
        return [self._request(*pair) for pair in zip(prompts, settings, strict=True)]

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self._encode(prompt)
        self._check_length(len(ids), params.max_tokens)
        eos = () if params.ignore_eos else self.model.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        seed = secrets.randbits(32) if params.seed is None else params.seed
        return Request(ids, params, stop_ids, seed)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise JspecError("this model has no tokenizer: pass token ids, or LLM(tokenizer=)")
            ids = list(self.tokenizer.encode(prompt))
        else:
            ids = [int(token) for token in prompt]
        if not ids:
            raise JspecError("the prompt is empty: give at least one token")
        wrong = [t for t in ids if not 0 <= t < self.model.vocab_size]
        if wrong:
            raise JspecError(
                f"token id {wrong[0]} is outside the vocabulary of {self.model.vocab_size}"
            )
        return ids

    def _check_length(self, prompt: int, max_tokens: int) -> None:
        limit, K = self.max_model_len, self.drafter.num_speculative_tokens
        if prompt > limit:
            raise JspecError(f"the prompt has {prompt} tokens, the model's limit is {limit}")
        if prompt + max_tokens + K > limit:
            raise JspecError(
                f"prompt ({prompt}) + max_tokens ({max_tokens}) + num_speculative_tokens ({K}) "
                f"exceed the model's limit of {limit} tokens: lower max_tokens"
            )

    def _output(self, request: Request, progress: Progress) -> RequestOutput:
        text = "" if self.tokenizer is None else self.tokenizer.decode(progress.token_ids)
        return RequestOutput(
            prompt_token_ids=list(request.prompt),
            token_ids=progress.token_ids,
            text=text,
            finish_reason="stop" if progress.finish == Finish.STOP else "length",
            metrics=progress.metrics,
            seed=request.seed,
        )


def default_widths(num_speculative_tokens: int, dtype: str) -> tuple[int, ...]:
    """Block widths for this machine: on a CPU a narrow pass is cheaper, and one of a single
    token in a 16-bit type takes a slow path in XLA; elsewhere a pass of K+1 costs what one does."""
    widest = num_speculative_tokens + 1
    if jax.default_backend() != "cpu":
        return (widest,)
    narrow = 1 if dtype == "float32" else 2
    return tuple(sorted({narrow, max(widest, narrow)}))


def enable_compilation_cache(path: str | Path | None = None) -> None:
    """Keeps compiled programs in `path` (None: the user's cache folder) across processes."""
    import platformdirs

    folder = Path(path) if path is not None else Path(platformdirs.user_cache_dir("jspec")) / "xla"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _auto_mesh(mesh: Mesh) -> Mesh:
    """The same devices with every axis left to XLA's sharding propagation."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def _powers_of_two(most: int) -> tuple[int, ...]:
    return tuple(sorted({min(1 << i, most) for i in range(most.bit_length() + 1)}))


def _as_list(prompts: Any) -> Sequence[Prompt]:
    """One text or one list of ids becomes a list of one prompt."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]
    if not len(prompts):
        raise JspecError("no prompts: give a text, token ids or a list of them")
    return prompts
