"""Another engine in a process of its own, to be timed in turn with this one."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

from jspec.errors import JspecError
from jspec.metrics import Metrics


class Peer:
    """Another engine in a process of its own, spoken to in JSON lines.

    It prints `{"ready": true}` once, then answers `{"token_ids": [...], "max_new_tokens": n}` with
    `{"token_ids": [...], "prefill_seconds": s, "decode_seconds": s}`, where decoding leaves out
    the first token, or with `{"error": "..."}`.
    """

    def __init__(self, command: str) -> None:
        """Starts it and waits until it is ready; JspecError if it does not get there."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in close)
        try:
            # A session of its own: Ctrl-C is for us, we end the peer.
            self._process = subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,
            )
        except (OSError, ValueError, IndexError) as error:
            self._errors.close()
            raise JspecError(f"peer {command!r} does not start: {error}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        try:
            if self._receive().get("ready") is not True:
                raise JspecError("peer: its first line is not {'ready': true}")
        except BaseException:
            self.close()
            raise

    def generate(
        self, token_ids: Sequence[int], max_tokens: int
    ) -> tuple[tuple[int, ...], Metrics]:
        """The tokens it makes after `token_ids` and what they cost it."""
        answer = self._ask({"token_ids": list(token_ids), "max_new_tokens": max_tokens})
        try:
            ids = tuple(int(token) for token in answer["token_ids"])
            prefill, decode = float(answer["prefill_seconds"]), float(answer["decode_seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise JspecError(f"peer: an answer without its figures ({error!r})") from None
        metrics = Metrics(
            num_prompt_tokens=len(token_ids),
            num_tokens=len(ids) - 1,
            num_rounds=len(ids) - 1,
            prefill_seconds=prefill,
            decode_seconds=decode,
        )
        return ids, metrics

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # it has ended: reading says how
            self._stdin.write(json.dumps(request) + "\n")
            self._stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        line = self._stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines()
            raise JspecError(f"peer ended with status {code}: {said[-1] if said else 'no word'}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise JspecError(f"peer: not a JSON object: {line.strip()[:60]!r}")
        if "error" in answer:
            raise JspecError(f"peer: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the process; a peer that does not leave when its input closes is killed."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._stdout.close()
        self._errors.close()
