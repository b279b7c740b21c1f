"""`LLM`: text in, text out. The front door for Python users."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from jspec import drafter_loading, loading
from jspec.decode import DecodeConfig, Finish
from jspec.drafters.base import Drafter
from jspec.drafters.growth import TreeShape
from jspec.drafters.lossy_sprinter import LossySprinter
from jspec.engine import outputs
from jspec.engine.batch import BatchRunner, Progress, Shape
from jspec.engine.requests import (
    MAX_SEED,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StreamChunk,
)
from jspec.engine.settings import Request, check_possible
from jspec.engine.text import OutputText
from jspec.engine.timing import RoundTimes, measure_round
from jspec.errors import JspecError
from jspec.model import Model
from jspec.sampling import LogitsProcessor
from jspec.verify import accept_all_lossy, verify

if TYPE_CHECKING:
    from checkpoints import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, str]

_STREAM_BURSTS = (1, 2, 4)
"""Rounds of the first bursts of a stream, the last again and again: a quick first token, then
few host reads."""
_STOP_BURST = 8
"""Rounds of a burst where only the host can see the end of a text."""


class LLM:
    """A target model, a drafter and the compiled loop that runs them.

    Args:
      model: the packaged "smollm2-135m-instruct", a Hugging Face folder or hub id, a GGUF file,
        a folder written by `jspec convert`, a Flax NNX module (see `jspec.from_nnx`), a
        `jspec.Model` together with `params`, or another `LLM`, whose weights are then shared.
      params: parameters of a `jspec.Model`.
      tokenizer: anything with `encode(text)` and `decode(ids)`; None: the checkpoint's own.
      drafter: "ngram", "none", a trained head's folder or file (EAGLE, EAGLE-3, MTP, Medusa), the
        name of one that comes with jspec, "int8" or "int4" (the target itself in so many bits), any
        model source (a draft model with the same vocabulary), several of these joined by commas in
        order of preference, or a `Drafter` together with `drafter_params`. "auto": what does best
        for the packaged model, "ngram" for others.
      num_speculative_tokens: K, tokens drafted a round, a tree's depth; None: what suits the
        drafter.
      tree: a `DynamicTree` or `StaticTree` for a head to draft, instead of a chain.
      dtype: "bfloat16", "float16" or "float32", of weights, keys and values.
      max_num_seqs: rows decoded together at most; longer lists run in turns.
      max_model_len: longest prompt + output, in tokens; None: what the model's positions allow.
      batch_sizes: numbers of rows to compile for; None: powers of two up to `max_num_seqs`.
      block_widths: tokens a row that a target pass may be compiled for, the last at least one more
        than a draft has; None: what suits the device. Bit-for-bit equality holds at one batch
        size and width. A model of one's own, whose products of single rows in 16 bits are slow
        on a CPU (ours are not), decodes plainly faster with (2,).
      max_logprobs: most probable tokens that a request may ask for in each place.
      logits_processor: a pure function `(logits [V], tokens [S], position) -> logits [V]` that
        is compiled into the loop and applied at every position, drafted or not; the tokens
        before `position` are the text so far, the others -1; -inf forbids a token.
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
        drafter: str | Path | Drafter = "auto",
        drafter_params: Any = (),
        num_speculative_tokens: int | None = None,
        tree: TreeShape | None = None,
        dtype: str = "bfloat16",
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        batch_sizes: Sequence[int] | None = None,
        block_widths: Sequence[int] | None = None,
        max_logprobs: int = 20,
        logits_processor: LogitsProcessor | None = None,
        mesh: Mesh | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise JspecError(f"{max_num_seqs=}: must be at least 1")
        if max_logprobs < 0:
            raise JspecError(f"{max_logprobs=}: must be 0 or more")
        mesh = None if mesh is None else _auto_mesh(mesh)
        options = loading.Options(dtype=dtype, mesh=mesh, progress=progress, report=report)
        shares = isinstance(model, LLM)
        target = model.target if shares else loading.load_target(model, params, options)
        asked = drafter_loading.Drafting(num_speculative_tokens, tree)
        drafter, drafting = drafter_loading.suited(drafter, asked, target.source)
        self.drafter, drafter_params = drafter_loading.load_drafter(
            drafter, drafter_params, target, drafting, options
        )
        self.target, self.options = target, options
        self.model = target.model
        self.params = (target.params, drafter_params)
        self.tokenizer: Tokenizer | Any = tokenizer or target.tokenizer
        self._decode = loading.decoder(self.tokenizer, skip_special_tokens=False)
        self.max_model_len = min(
            max_model_len or target.model.max_position_embeddings,
            target.model.max_position_embeddings,
        )
        self._batch_sizes = tuple(sorted(batch_sizes or _powers_of_two(max_num_seqs)))
        if self._batch_sizes[0] < 1:
            raise JspecError(f"{batch_sizes=}: each must be at least 1")
        nodes, most_rows = self.drafter.num_draft_nodes, self._batch_sizes[-1]
        widths = tuple(block_widths or default_widths(nodes, dtype, most_rows))
        rule = accept_all_lossy if isinstance(self.drafter, LossySprinter) else verify
        self._runner = BatchRunner(
            config=DecodeConfig(
                self.model, self.drafter, widths, max_logprobs=max_logprobs, rule=rule
            ),
            params=self.params,
            dtype=jnp.dtype(dtype),
            processor=logits_processor,
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
        prompts = _as_list(prompts)
        requests = self._requests(prompts, sampling_params)
        finished: list[list[CompletionOutput]] = [[] for _ in requests]
        results: list[RequestOutput] = []
        for batch in _batches(requests, self._batch_sizes[-1]):
            parts = [part for _, part in batch]
            rows = self._output_rows(parts)
            bursts = (_STOP_BURST,) if any(r.params.stop for r in parts) else ()
            *_, last = self._run(parts, rows, bursts)
            for row, done in zip(rows, last, strict=True):
                index = batch[row.part][0]
                number = len(finished[index])
                completed = self._completion(requests[index], number, done, row.text)
                finished[index].append(completed)
                if number + 1 == requests[index].params.n:
                    prompt = _text_or_none(prompts[index])
                    results.append(self._result(requests[index], prompt, finished[index], done))
            if progress is not None:
                progress("generating", len(results), len(requests))
        return results

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, formatted by the model's chat template."""
        if not messages:
            raise JspecError("messages is empty: give at least one message")
        is_one = isinstance(messages[0], Mapping)
        many = cast("Sequence[Sequence[Message]]", [messages] if is_one else messages)
        return self.generate([self.chat_prompt(m) for m in many], sampling_params)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[StreamChunk]:
        """Yields the completion of one prompt or conversation as it is made."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            prompt = self.chat_prompt(cast("Sequence[Message]", prompt))
        prompt = cast("Prompt", prompt)
        (request,) = self._requests([prompt], sampling_params)
        if request.params.n > self._batch_sizes[-1]:
            raise request.params.error("n", f"a stream has at most {self._batch_sizes[-1]} outputs")
        return self._stream(request, _text_or_none(prompt))

    def _stream(self, request: Request, prompt: str | None) -> Iterator[StreamChunk]:
        rows = self._output_rows([request])
        seen, open_rows = [0] * len(rows), set(range(len(rows)))
        for burst in self._run([request], rows, _STREAM_BURSTS):
            for index in sorted(open_rows):
                row, done = rows[index], burst[index]
                ended = done.finish != Finish.RUNNING
                start, seen[index] = seen[index], len(done.token_ids)
                chunk = StreamChunk(
                    text=row.text.take(ended=ended),
                    token_ids=done.token_ids[start:],
                    index=index,
                    logprobs=outputs.logprobs_since(request, done, start, self._decode_one),
                )
                if ended:
                    open_rows.remove(index)
                    reason = "stop" if done.finish == Finish.STOP else "length"
                    chunk = dataclasses.replace(chunk, finish_reason=reason)
                if not open_rows:
                    completed = [
                        self._completion(request, i, burst[i], r.text) for i, r in enumerate(rows)
                    ]
                    result = self._result(request, prompt, completed, done)
                    chunk = dataclasses.replace(chunk, output=result)
                yield chunk

    def _run(
        self, parts: Sequence[Request], rows: Sequence[_Row], bursts: Sequence[int]
    ) -> Iterator[list[Progress]]:
        """Runs one batch; each row's text follows its tokens and may end it."""

        def watch(row: int, new: list[int], finish: Finish) -> int | None:
            ended, by_token = finish != Finish.RUNNING, finish == Finish.STOP
            return rows[row].text.push(new, ended=ended, by_token=by_token)

        shape = Shape(self._rows(len(parts)), self._rows(len(rows)))
        return self._runner.run(parts, shape=shape, burst_rounds=bursts, watch=watch)

    def _output_rows(self, parts: Sequence[Request]) -> list[_Row]:
        """A row for each seed of each request, with no text yet."""
        return [_Row(i, self._text(part)) for i, part in enumerate(parts) for _ in part.seeds]

    def _text(self, request: Request) -> OutputText:
        params = request.params
        return OutputText(
            loading.detokenizer(self.tokenizer, params.skip_special_tokens),
            tuple(params.stop),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _completion(
        self, request: Request, index: int, done: Progress, text: OutputText
    ) -> CompletionOutput:
        eos = self.model.eos_token_ids
        return outputs.completion(request, index, done, text, eos, self._decode_one)

    def _result(
        self,
        request: Request,
        prompt: str | None,
        completed: list[CompletionOutput],
        done: Progress,
    ) -> RequestOutput:
        return outputs.request_output(request, prompt, completed, done, self._decode_one)

    def _decode_one(self, token: int) -> str | None:
        return None if self.tokenizer is None else self._decode([token])

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

    def resident_bytes(self, rows: int = 1, capacity: int = 512) -> int:
        """Bytes that stay between rounds: parameters, each array counted once, and the state of
        `rows` rows with room for `capacity` tokens each."""
        return self._runner.resident_bytes(rows, capacity)

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
        params.check(self.model.vocab_size, self._runner.config.max_logprobs)
        if self.tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise params.error(name, "this model has no tokenizer, pass LLM(tokenizer=)")
        eos = () if params.ignore_eos else self.model.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        seed = secrets.randbits(32) if params.seed is None else params.seed
        seeds = tuple((seed + j) % (MAX_SEED + 1) for j in range(params.n))
        bad_words = loading.encode_bad_words(
            self.tokenizer, params.bad_words, self.model.vocab_size
        )
        request = Request(ids, params, stop_ids, bad_words, seeds)
        check_possible(request, self.model.vocab_size)
        return request

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


class _Row(NamedTuple):
    """One output of a batch."""

    part: int
    """Which of the batch's requests it belongs to."""
    text: OutputText


def _text_or_none(prompt: Any) -> str | None:
    return prompt if isinstance(prompt, str) else None


def _batches(requests: Sequence[Request], size: int) -> Iterator[list[tuple[int, Request]]]:
    """Cuts requests into batches of at most `size` rows, in order, each as (index, request). A
    request with more rows than are left in a batch goes on in the next."""
    batch, room = [], size
    for index, request in enumerate(requests):
        seeds = request.seeds
        while seeds:
            batch.append((index, request._replace(seeds=seeds[:room])))
            seeds, room = seeds[room:], room - len(seeds[:room])
            if room == 0:
                yield batch
                batch, room = [], size
    if batch:
        yield batch


def default_widths(num_drafted: int, dtype: str, max_rows: int) -> tuple[int, ...]:
    """Block widths for this machine, for drafts of so many nodes: on a CPU a narrow pass is
    cheaper. In 16 bits one over two tokens of a single row is no dearer than one over one, and
    rounds as wider ones do. Elsewhere a pass of a few costs what one does."""
    widest = num_drafted + 1
    if jax.default_backend() != "cpu":
        return (widest,)
    narrow = 1 if dtype == "float32" else 2
    if max_rows > 1:
        narrow = min(narrow, widest)
    return tuple(sorted({narrow, max(narrow, widest)}))


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
