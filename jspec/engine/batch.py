"""Runs batches of requests through the compiled loop. Host only; knows nothing of text.

Shapes are bucketed (rows, capacity, stop tokens), so few programs are compiled, each once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jspec.decode import DecodeConfig, DecodeState, Finish, init_state, run_rounds, state_specs
from jspec.engine.requests import SamplingParams
from jspec.errors import JspecError
from jspec.metrics import Metrics
from jspec.params import is_spec
from jspec.sampling import Sampling
from jspec.sharding import tree_shardings

PAD_TOKEN = -1
ALL_ROUNDS = np.iinfo(np.int32).max


class Request(NamedTuple):
    """One row's worth of work."""

    prompt: Sequence[int]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    seed: int


class Progress(NamedTuple):
    """A row after a burst."""

    token_ids: list[int]
    """All generated so far."""
    finish: Finish
    metrics: Metrics


@dataclasses.dataclass
class BatchRunner:
    """Compiled programs and settings shared by all batches of one engine."""

    config: DecodeConfig
    params: tuple[Any, Any]
    """(target, drafter's)."""
    dtype: Any
    """Of keys and values."""
    page_size: int = 16
    min_capacity: int = 512
    """Capacities are powers of two from here up. Cost follows the length, not the capacity."""
    mesh: Mesh | None = None
    on_compile: Callable[[str, int, int], None] | None = None
    """Called as (label, 0, 1) before and (label, 1, 1) after a compilation."""
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def run(
        self, requests: Sequence[Request], *, rows: int, burst_rounds: Sequence[int] = ()
    ) -> Iterator[list[Progress]]:
        """Yields the rows' progress after each burst, the last when all have finished.

        `rows` >= len(requests) is the compiled batch size. The bursts take `burst_rounds` rounds
        in turn, the last entry again and again; none: everything in one.
        """
        state = self._init(requests, rows)
        program = self._program(state)
        start = time.perf_counter()
        state = jax.block_until_ready(program(self.params, state, np.int32(0)))
        prefill_seconds = time.perf_counter() - start
        decode_seconds, burst = 0.0, 0
        while True:
            rounds = burst_rounds[min(burst, len(burst_rounds) - 1)] if burst_rounds else ALL_ROUNDS
            start = time.perf_counter()
            state = jax.block_until_ready(program(self.params, state, np.int32(rounds)))
            decode_seconds += time.perf_counter() - start
            burst += 1
            progress = _read(requests, state, prefill_seconds, decode_seconds)
            yield progress
            if all(row.finish != Finish.RUNNING for row in progress):
                return

    def _init(self, requests: Sequence[Request], rows: int) -> DecodeState:
        longest = max(len(r.prompt) + r.params.max_tokens for r in requests)
        capacity = max(self.min_capacity, 1 << (longest - 1).bit_length())
        arrays = _request_arrays(requests, rows, capacity)
        state = init_state(self.config, **arrays, page_size=self.page_size, dtype=self.dtype)
        if self.mesh is None:
            return state
        return jax.device_put(state, tree_shardings(self.mesh, state_specs(state), is_spec))

    def _program(self, state: DecodeState) -> Any:
        """The compiled loop for the shapes of `state`."""
        leaves, treedef = jax.tree.flatten(state)
        key = (treedef, tuple((x.shape, x.dtype) for x in leaves))
        if key not in self.programs:
            report = self.on_compile or (lambda *_: None)
            report("compiling", 0, 1)
            self.programs[key] = self._compile(state)
            report("compiling", 1, 1)
        return self.programs[key]

    def _compile(self, state: DecodeState) -> Any:
        """Says that a state comes out sharded as it went in, so that bursts can follow bursts."""
        program = jax.jit(
            run_rounds,
            static_argnums=0,
            donate_argnums=2,
            out_shardings=jax.tree.map(lambda x: x.sharding, state),
        )
        return program.lower(self.config, self.params, state, np.int32(0)).compile()


def _request_arrays(requests: Sequence[Request], rows: int, capacity: int) -> dict[str, Any]:
    """The host's arrays of a batch; rows without a request are born finished."""
    num_stops = max(4, *(len(r.stop_ids) for r in requests))
    tokens = np.zeros((rows, capacity), np.int32)
    stop_ids = np.full((rows, 1 << (num_stops - 1).bit_length()), PAD_TOKEN, np.int32)
    lengths, max_lengths = np.ones((rows,), np.int32), np.ones((rows,), np.int32)
    for i, request in enumerate(requests):
        lengths[i] = len(request.prompt)
        max_lengths[i] = lengths[i] + request.params.max_tokens
        tokens[i, : lengths[i]] = request.prompt
        stop_ids[i, : len(request.stop_ids)] = request.stop_ids

    def column(values: list[Any], fill: Any, dtype: Any) -> Any:
        return np.array(values + [fill] * (rows - len(requests)), dtype)

    settings = [r.params for r in requests]
    sampling = Sampling(
        temperature=column([p.temperature for p in settings], 0.0, np.float32),
        top_k=column([max(p.top_k, 0) for p in settings], 0, np.int32),
        top_p=column([p.top_p for p in settings], 1.0, np.float32),
        min_p=column([p.min_p for p in settings], 0.0, np.float32),
        seed=column([r.seed for r in requests], 0, np.uint32),
        coupled=column([p.verification == "coupled" for p in settings], False, np.bool_),
    )
    return {
        "tokens": tokens,
        "lengths": lengths,
        "max_lengths": max_lengths,
        "stop_ids": stop_ids,
        "sampling": sampling,
    }


def _read(
    requests: Sequence[Request], state: DecodeState, prefill_seconds: float, decode_seconds: float
) -> list[Progress]:
    """Brings a batch's progress to the host."""
    tokens, lengths, finish, counters = jax.device_get(
        (state.tokens, state.lengths, state.finish, state.counters)
    )
    rows = []
    for i, request in enumerate(requests):
        if finish[i] == Finish.INVALID:
            raise JspecError(
                f"the model's logits are not finite after {lengths[i]} tokens: its weights hold "
                'NaN or overflow; check the checkpoint or use dtype="float32"'
            )
        start = len(request.prompt)
        metrics = Metrics(
            num_prompt_tokens=start,
            num_tokens=int(lengths[i]) - start,
            num_rounds=int(counters.rounds[i]),
            drafted_per_position=tuple(counters.drafted[i].tolist()),
            accepted_per_position=tuple(counters.accepted[i].tolist()),
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
        )
        generated = tokens[i, start : lengths[i]].tolist()
        rows.append(Progress(generated, Finish(int(finish[i])), metrics))
    return rows
