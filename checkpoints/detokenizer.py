"""Text of a growing sequence of ids, piece by piece. Knows nothing of where ids come from."""

from __future__ import annotations

from collections.abc import Iterable

from checkpoints.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns ids into text as they arrive; all pieces together are `decode` of all ids.

    Only a window of ids is decoded at each push: the last ones whose text is out (`_context`,
    they decide about a leading space) and those whose text is not yet all out (`_pending`).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._open_ids = _byte_fallback_ids(tokenizer)
        if skip_special_tokens and self._open_ids:
            self._open_ids |= _special_ids(tokenizer)  # the bytes on both sides are one run
        self._context: list[int] = []
        self._pending: list[int] = []
        self._sent = 0  # characters of the pending text that are out already

    def push(self, ids: Iterable[int]) -> str:
        """The new text that no later id can change: never half a character."""
        self._pending += ids
        whole = self._pending_text(self._pending)
        settled = self._pending_text(self._without_open_bytes()).rstrip(_REPLACEMENT)
        piece, self._sent = settled[self._sent :], max(self._sent, len(settled))
        # An empty text settles nothing: special tokens that are skipped give no context.
        if whole and settled == whole:
            self._context, self._pending, self._sent = self._pending, [], 0
        return piece

    def flush(self) -> str:
        """The rest, where the sequence ended amid a character; then ready for a new sequence."""
        piece = self._pending_text(self._pending)[self._sent :]
        self._context, self._pending, self._sent = [], [], 0
        return piece

    def _pending_text(self, pending: list[int]) -> str:
        return self._decode(self._context + pending)[len(self._decode(self._context)) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def _without_open_bytes(self) -> list[int]:
        """Pending ids up to the trailing run of byte tokens.

        A decoder with byte fallback reads such a run as one: if its last byte turns out invalid,
        all of it becomes U+FFFD.
        """
        end = len(self._pending)
        while end and self._pending[end - 1] in self._open_ids:
            end -= 1
        return self._pending[:end]


def _byte_fallback_ids(tokenizer: Tokenizer) -> frozenset[int]:
    # Cheap enough to do per request: 256 look-ups. A byte-level vocabulary has no such tokens.
    names = (f"<0x{byte:02X}>" for byte in range(256))
    ids = (tokenizer.backend.token_to_id(name) for name in names)
    return frozenset(index for index in ids if index is not None)


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.backend.get_added_tokens_decoder()
    return frozenset(index for index, token in added.items() if token.special)
