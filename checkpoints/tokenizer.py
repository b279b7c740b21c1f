"""Text to token ids and back, and chats to text. Knows nothing of models.

A thin class over `tokenizers`: importing transformers takes longer than loading a model here, and
its fast tokenizers are this same object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints import chat
from checkpoints.files import read_json, read_json_or_empty, write_json
from jspec.errors import JspecError

if TYPE_CHECKING:
    import tokenizers

_SLOW_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model")


def has_tokenizer(folder: Path) -> bool:
    """Whether `Tokenizer.load` finds something in `folder`."""
    return any((folder / name).is_file() for name in ("tokenizer.json", *_SLOW_FILES))


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and its chat template. Immutable; safe to share between threads."""

    backend: tokenizers.Tokenizer
    config: Mapping[str, Any]
    """As in `tokenizer_config.json`: special tokens by name, without the template."""
    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens written out in it become their ids."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a chat (`role`, `content`). It holds its special tokens: encode it with
        `add_special_tokens=False`."""
        if self.chat_template is None:
            raise JspecError(
                "this model has no chat template: give a plain prompt, or a chat model's name"
            )
        tokens = {
            f"{kind}_token": self.special_token(kind) for kind in ("bos", "eos", "pad", "unk")
        }
        return chat.render(
            self.chat_template,
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **{name: token for name, token in tokens.items() if token is not None},
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; a model's own may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        return self._special_id("bos")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text or a turn; a config's `eos_token_ids` may hold more."""
        return self._special_id("eos")

    def special_token(self, kind: str) -> str | None:
        """The text of the special token `kind` ("bos", "eos", ...), if there is one."""
        token = self.config.get(f"{kind}_token")
        return token.get("content") if isinstance(token, dict) else token

    def _special_id(self, kind: str) -> int | None:
        token = self.special_token(kind)
        return None if token is None else self.backend.token_to_id(token)

    def save(self, folder: str | Path) -> None:
        """`folder` holds what `load` (and transformers) needs to make this tokenizer again."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", dict(self.config))
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer in `folder`. JspecError when there is none or it is damaged."""
        folder = Path(folder)
        if not has_tokenizer(folder):
            raise JspecError(f"{folder}: has no tokenizer.json; fetch the tokenizer's files too")
        config = read_json_or_empty(folder / "tokenizer_config.json")
        if (folder / "tokenizer.json").is_file():
            backend = _read_backend(folder / "tokenizer.json")
        else:
            backend = _convert_slow(folder)
        # A file may ask for padding or truncation, which only training wants.
        backend.no_padding()
        backend.no_truncation()
        template = config.pop("chat_template", None)
        return cls(backend, _add_missing_tokens(backend, config), _template(folder, template))


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise JspecError(f"{file}: damaged ({error}); fetch the file again") from error


def _convert_slow(folder: Path) -> tokenizers.Tokenizer:
    """For folders with only a sentencepiece model or a vocabulary: transformers can read those."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:  # whatever the many tokenizer classes raise
        detail = str(error).split("\n")[0]
        raise JspecError(f"{folder}: tokenizer cannot be read ({detail})") from error


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> dict[str, Any]:
    """Adds what `added_tokens_decoder` has beyond tokenizer.json; returns the config without it."""
    import tokenizers

    entries = config.pop("added_tokens_decoder", None) or {}
    known = backend.get_added_tokens_decoder()
    for index, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        if int(index) not in known and isinstance(entry, dict):
            fields = {key: value for key, value in entry.items() if key != "__type"}
            backend.add_tokens([tokenizers.AddedToken(**fields)])
    return config


def _template(folder: Path, in_config: Any) -> str | None:
    """The chat template: its own file goes before tokenizer_config.json, as in transformers."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if (folder / "chat_template.json").is_file():
        return read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(in_config, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in in_config}
        return named.get("default")
    return in_config
