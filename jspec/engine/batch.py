"""Runs batches of requests through the compiled loop. Host only; knows nothing of text.

Shapes are bucketed (prompts, rows, capacity, stop tokens, bad words), so few programs are
compiled, each once. A batch's prompts are read one row each; then the state is forked into the
rows that go on from them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspec.decode import (
    DecodeConfig,
    DecodeState,
    Finish,
    cut,
    fork,
    init_state,
    read_prompts,
    run_rounds,
    state_specs,
)
from jspec.engine.settings import Request, sampling_of
from jspec.errors import JspecError
from jspec.logprobs import TokenLogprobs
from jspec.metrics import Metrics
from jspec.params import is_spec
from jspec.sampling import LogitsProcessor, neutral
from jspec.sharding import on_mesh, tree_shardings

ALL_ROUNDS = np.iinfo(np.int32).max

Watch = Callable[[int, list[int], Finish], int | None]
"""Called as (row, new tokens, finish) after a burst; says how many of the row's generated tokens
to keep if it must end, which drops the others as if they had never been."""


class Progress(NamedTuple):
    """A row after a burst."""

    token_ids: list[int]
    """All generated so far."""
    finish: Finish
    metrics: Metrics
    logprobs: TokenLogprobs | None
    """numpy arrays `[S]` and `[S, N]` by absolute position, if anyone in the batch asked."""


class Shape(NamedTuple):
    """Rows that a batch is compiled for."""

    prompts: int
    rows: int


@dataclasses.dataclass
class BatchRunner:
    """Compiled programs and settings shared by all batches of one engine."""

    config: DecodeConfig
    params: tuple[Any, Any]
    """(target, drafter's)."""
    dtype: Any
    """Of keys and values."""
    processor: LogitsProcessor | None = None
    page_size: int = 16
    min_capacity: int = 512
    """Capacities are powers of two from here up. Cost follows the length, not the capacity."""
    mesh: Mesh | None = None
    on_compile: Callable[[str, int, int], None] | None = None
    """Called as (label, 0, 1) before and (label, 1, 1) after a compilation."""
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def run(
        self,
        requests: Sequence[Request],
        *,
        shape: Shape,
        burst_rounds: Sequence[int] = (),
        watch: Watch = lambda *_: None,
    ) -> Iterator[list[Progress]]:
        """Yields the progress of all rows (one for each seed of each request, in order) after
        each burst, the last when all have finished.

        The bursts take `burst_rounds` rounds in turn, the last entry again and again; none:
        everything in one.
        """
        state, seconds = self._start(requests, shape)
        reader = _Reader(requests, self.config, seconds)
        burst = 0
        while True:
            rounds = burst_rounds[min(burst, len(burst_rounds) - 1)] if burst_rounds else ALL_ROUNDS
            state, seconds = self._run(run_rounds, self.params, state, np.int32(rounds))
            reader.decode_seconds += seconds
            burst += 1
            keep = reader.read(state, watch)
            if keep is not None:
                state, _ = self._run(cut, state, keep, reader.finish)
            yield reader.progress()
            if np.all(reader.finish != Finish.RUNNING):
                return

    def _start(self, requests: Sequence[Request], shape: Shape) -> tuple[DecodeState, float]:
        """The state of all rows with their prompts read, and how long that took."""
        state = self._init(requests, shape)
        scored = any(r.params.prompt_logprobs is not None for r in requests)
        read = _read_scored_prompts if scored else read_prompts
        state, seconds = self._run(read, self.params, state)
        parent = [i for i, request in enumerate(requests) for _ in request.seeds]
        if len(parent) == len(requests) and shape.prompts == shape.rows:
            return state, seconds
        idle = np.arange(shape.rows) >= len(parent)
        parent += [0] * (shape.rows - len(parent))
        sampling = self._sampling(requests, shape.rows)
        state, more = self._run(fork, state, np.array(parent, np.int32), idle, sampling)
        return state, seconds + more

    def _init(self, requests: Sequence[Request], shape: Shape) -> DecodeState:
        """A row for each prompt; rows without one are born finished."""
        longest = max(len(r.prompt) + r.params.max_tokens for r in requests)
        capacity = max(self.min_capacity, 1 << (longest - 1).bit_length())
        tokens = np.zeros((shape.prompts, capacity), np.int32)
        lengths, max_lengths = np.ones((2, shape.prompts), np.int32)
        for i, request in enumerate(requests):
            lengths[i] = len(request.prompt)
            max_lengths[i] = lengths[i] + request.params.max_tokens
            tokens[i, : lengths[i]] = request.prompt
        first_rows = [r._replace(seeds=r.seeds[:1]) for r in requests]
        state = init_state(
            self.config,
            tokens=tokens,
            lengths=lengths,
            max_lengths=max_lengths,
            sampling=self._sampling(first_rows, shape.prompts),
            page_size=self.page_size,
            dtype=self.dtype,
        )
        if self.mesh is None:
            return state
        return jax.device_put(state, tree_shardings(self.mesh, state_specs(state), is_spec))

    def resident_bytes(self, rows: int, capacity: int) -> int:
        """Of parameters, each array once, and of the state of a batch between rounds."""
        row = jax.ShapeDtypeStruct((rows,), jnp.int32)
        make = functools.partial(
            init_state, self.config, page_size=self.page_size, dtype=self.dtype
        )
        state = jax.eval_shape(
            make,
            tokens=jax.ShapeDtypeStruct((rows, capacity), jnp.int32),
            lengths=row,
            max_lengths=row,
            sampling=jax.eval_shape(lambda: neutral(rows, self.config.model.vocab_size)),
        )
        arrays = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(self.params)}
        return sum(arrays.values()) + sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
        )

    def _sampling(self, requests: Sequence[Request], rows: int) -> Any:
        vocab_size = self.config.model.vocab_size
        return sampling_of(requests, rows=rows, vocab_size=vocab_size, processor=self.processor)

    def _run(self, function: Any, *arguments: Any) -> tuple[DecodeState, float]:
        """The state that `function` makes of its arguments, and the seconds it took on the
        device. Compiled once for the shapes of the arguments."""
        leaves, treedef = jax.tree.flatten(arguments)
        key = (function, treedef, tuple((x.shape, x.dtype) for x in leaves))
        if key not in self.programs:
            report = self.on_compile or (lambda *_: None)
            report("compiling", 0, 1)
            self.programs[key] = self._compile(function, arguments)
            report("compiling", 1, 1)
        start = time.perf_counter()
        state = jax.block_until_ready(self.programs[key](*arguments))
        return state, time.perf_counter() - start

    def _compile(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """A state among the arguments is donated, unless its rows are forked. All states are
        sharded in one way, so that programs can follow each other."""
        states = [i for i, x in enumerate(arguments) if isinstance(x, DecodeState)]
        donated = () if function is fork else states
        if function not in (fork, cut):
            function = functools.partial(function, self.config)
        shardings = None
        if self.mesh is not None:
            specs = state_specs(jax.eval_shape(function, *arguments))
            shardings = tree_shardings(self.mesh, specs, is_spec)
        program = jax.jit(function, donate_argnums=donated, out_shardings=shardings)
        with on_mesh(self.mesh):
            return program.lower(*arguments).compile()


_read_scored_prompts = functools.partial(read_prompts, scored=True)


class _Reader:
    """What the host knows of a batch: reads its state after each burst."""

    def __init__(
        self, requests: Sequence[Request], config: DecodeConfig, prefill_seconds: float
    ) -> None:
        self._rows = [request for request in requests for _ in request.seeds]
        self._num_drafts = config.drafter.num_speculative_tokens
        self._is_lossy = config.is_lossy
        self._wants_logprobs = any(
            r.params.logprobs is not None or r.params.prompt_logprobs is not None for r in requests
        )
        self._prefill_seconds, self.decode_seconds = prefill_seconds, 0.0
        self.finish = np.zeros((0,), np.int32)
        """`[rows]`: of all rows, idle ones too."""
        self._seen = [len(r.prompt) for r in self._rows]

    def read(self, state: DecodeState, watch: Watch) -> np.ndarray | None:
        """Takes in a burst. What `cut` must keep of each row, or None if nothing is to be cut."""
        self._tokens, lengths, finish, self._log = jax.device_get(
            (state.tokens, state.lengths, state.finish, state.log)
        )
        self._logprobs = jax.device_get(state.logprobs) if self._wants_logprobs else None
        self._lengths, self.finish = lengths.copy(), finish.copy()
        keep = np.full_like(lengths, ALL_ROUNDS)
        for i, request in enumerate(self._rows):
            _refuse_failures(request, Finish(int(finish[i])), int(lengths[i]))
            start, end = self._seen[i], int(lengths[i])
            self._seen[i] = end
            if start == end:
                continue
            kept = watch(i, self._tokens[i, start:end].tolist(), Finish(int(finish[i])))
            if kept is not None:
                keep[i] = self._lengths[i] = len(request.prompt) + kept
                self.finish[i] = Finish.STOP
        return keep if np.any(keep != ALL_ROUNDS) else None

    def progress(self) -> list[Progress]:
        return [self._progress(i, request) for i, request in enumerate(self._rows)]

    def _progress(self, row: int, request: Request) -> Progress:
        start, end = len(request.prompt), int(self._lengths[row])
        return Progress(
            token_ids=self._tokens[row, start:end].tolist(),
            finish=Finish(int(self.finish[row])),
            metrics=self._metrics(row, start, end - start),
            logprobs=self._logprobs and jax.tree.map(lambda x: x[row], self._logprobs),
        )

    def _metrics(self, row: int, num_prompt_tokens: int, num_tokens: int) -> Metrics:
        """Counts the rounds that yielded the tokens that are left."""
        done = int(self._log.rounds[row])
        drafted, accepted = self._log.drafted[row, :done], self._log.accepted[row, :done]
        before = np.cumsum(accepted + 1) - (accepted + 1)
        counted = before < num_tokens
        places = np.arange(self._num_drafts)[:, None]
        return Metrics(
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=num_tokens,
            num_rounds=int(counted.sum()),
            drafted_per_position=tuple((places < drafted[counted]).sum(axis=1).tolist()),
            accepted_per_position=tuple((places < accepted[counted]).sum(axis=1).tolist()),
            num_lossy=int(accepted[counted].sum()) if self._is_lossy else 0,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self.decode_seconds,
        )


def _refuse_failures(request: Request, finish: Finish, length: int) -> None:
    if finish == Finish.INVALID:
        raise JspecError(
            f"the model's logits are not finite after {length} tokens: its weights hold "
            'NaN or overflow; check the checkpoint or use dtype="float32"'
        )
    if finish == Finish.FORBIDDEN:
        raise JspecError(
            f"no token is allowed after {length} tokens: allowed_token_ids, bad_words, min_tokens "
            "and the logits processor leave none"
        )
