"""A tokenizer from the metadata of a GGUF file. Knows nothing of weights.

The file holds tokens, merges and token types, and names its pre-tokenizer (`tokenizer.ggml.pre`).
What each name means is llama.cpp's table; here each is the same splitting in `tokenizers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from checkpoints.tokenizer import Tokenizer
from jspec.errors import JspecError

if TYPE_CHECKING:
    import tokenizers

CONTROL, USER_DEFINED = 3, 4

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)

PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",),
}
"""Regular expressions applied in turn; a match, and what lies between two, is a piece."""
_ADDS_BOS = ("llama3", "llama-v3", "llama-bpe")


def from_metadata(data: Mapping[str, Any], *, name: str) -> Tokenizer:
    """The tokenizer the file describes. JspecError for a kind that is not supported."""
    kind = data.get("tokenizer.ggml.model")
    if kind is None:
        raise JspecError(f"{name}: has no tokenizer; use a GGUF file that has one")
    if kind != "gpt2":
        raise JspecError(
            f"{name}: GGUF tokenizer model {kind!r} is not supported, only 'gpt2' (byte-level "
            "BPE); use the model's Hugging Face folder"
        )
    pre = data.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise JspecError(
            f"{name}: GGUF pre-tokenizer {pre!r} is not supported; "
            f"supported: {', '.join(PRE_TOKENIZERS)}"
        )
    try:
        backend = _backend(data, pre)
    except KeyError as error:
        raise JspecError(f"{name}: damaged tokenizer: {error} is missing") from error
    except Exception as error:  # tokenizers raises plain Exception
        raise JspecError(f"{name}: damaged tokenizer ({error})") from error
    return Tokenizer(backend, _config(data), data.get("tokenizer.chat_template"))


def _backend(data: Mapping[str, Any], pre: str) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    tokens = data["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in data["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a piece that is itself a token whole, whatever the merges would give.
    model = models.BPE(vocab, merges, ignore_merges=pre in _ADDS_BOS)
    backend = Backend(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    added = [  # tokens of the vocabulary: they keep their ids
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, data.get("tokenizer.ggml.token_type", []), strict=False)
        if kind in (CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)
    if data.get("tokenizer.ggml.add_bos_token", pre in _ADDS_BOS):
        _begin_with(backend, tokens, data["tokenizer.ggml.bos_token_id"])
    return backend


def _pre_tokenizer(pre: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(e), behavior="isolated") for e in PRE_TOKENIZERS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_level])


def _begin_with(backend: tokenizers.Tokenizer, tokens: list[str], bos: int) -> None:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=[f"{tokens[bos]}:0", "$A:0"], special_tokens=[(tokens[bos], bos)]
    )


def _config(data: Mapping[str, Any]) -> dict[str, Any]:
    tokens = data["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {kind: data.get(f"tokenizer.ggml.{name}_token_id") for kind, name in names.items()}
    found = {f"{kind}_token": tokens[i] for kind, i in ids.items() if i is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**9, **found}
