"""Tokenizers: equal to the reference from every kind of file; text that streams in whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import CHAT_TEMPLATE, hf_config, hf_tensors, write_gguf, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import Checkpoint, Detokenizer, Tokenizer
from checkpoints.gguf_file import open_gguf
from checkpoints.gguf_tokenizer import from_metadata
from jspec.errors import JspecError

GOLDEN = json.loads(Path(__file__).with_name("tokenizer_golden.json").read_text())
TEXTS = [entry["text"] for entry in GOLDEN["texts"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.mark.parametrize("entry", GOLDEN["texts"], ids=range(len(TEXTS)))
def test_golden_texts(default_model: Checkpoint, entry: dict[str, Any]) -> None:
    tokenizer = default_model.tokenizer
    assert tokenizer.encode(entry["text"]) == entry["ids"]
    assert tokenizer.decode(entry["ids"]) == entry["decoded"]
    whole = tokenizer.decode(entry["ids"], skip_special_tokens=False)
    assert whole == entry["decoded_with_special"]


def test_golden_set_has_texts_that_tell_pre_tokenizers_apart() -> None:
    assert "x  1" in GOLDEN["differs_uncorrected"]


@pytest.mark.parametrize("chat", GOLDEN["chats"], ids=range(len(GOLDEN["chats"])))
def test_golden_chats(default_model: Checkpoint, chat: dict[str, Any]) -> None:
    text = default_model.tokenizer.apply_chat_template(
        chat["messages"], add_generation_prompt=chat["add_generation_prompt"]
    )
    assert text == chat["text"]


def test_equals_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    for text in [*TEXTS, "hello world", "hell  o 12"]:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text)
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.eos_token_id == theirs.eos_token_id == 2
    assert tokenizer.bos_token_id == theirs.bos_token_id == 1
    assert tokenizer.vocab_size == len(theirs)


def test_from_gguf_equals_the_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = hf_config()
    path = write_gguf(tmp_path / "m.gguf", config, hf_tensors(config))
    from_file = open_gguf(path).tokenizer()
    for text in [*TEXTS, "hello world", "hell  o 12"]:
        assert from_file.encode(text) == tokenizer.encode(text), text
    assert from_file.eos_token_id == 2
    assert from_file.bos_token_id == 1
    assert from_file.chat_template == CHAT_TEMPLATE
    assert from_file.vocab_size == tokenizer.vocab_size


def test_save_and_load(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "copy")
    again = Tokenizer.load(tmp_path / "copy")
    assert again.encode("hello <|im_end|> 1") == tokenizer.encode("hello <|im_end|> 1")
    assert again.config == tokenizer.config
    assert again.chat_template == tokenizer.chat_template


def metadata(**changes: Any) -> dict[str, Any]:
    data = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "<u>", *alphabet(), "aa", "aaa", "11"],
        "tokenizer.ggml.token_type": [3, 4, *[1] * 259],
        "tokenizer.ggml.merges": ["a a", "1 1"],
        "tokenizer.ggml.bos_token_id": 0,
    }
    return data | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def pieces(pre: str, text: str) -> list[str]:
    """How the pre-tokenizer `pre` splits, for text that byte-level BPE spells as it is."""
    backend = from_metadata(metadata(pre=pre), name="m").backend
    assert backend.pre_tokenizer is not None
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def test_pre_tokenizers() -> None:
    # Expected by hand from llama.cpp's expressions.
    assert pieces("gpt-2", "ab'll  123!!") == ["ab", "'ll", "Ġ", "Ġ123", "!!"]
    assert pieces("smollm", "ab'll  123!!") == ["ab", "'ll", "ĠĠ", "1", "2", "3", "!!"]
    assert pieces("llama-bpe", "AB'LL 12345!\n\nx") == ["AB", "'LL", "Ġ", "123", "45", "!ĊĊ", "x"]
    assert pieces("qwen2", "ab'll 123!\nx") == ["ab", "'ll", "Ġ", "1", "2", "3", "!Ċ", "x"]
    assert pieces("default", "ab!! 1234") == ["ab", "!!", "Ġ", "123", "4"]


def test_token_types() -> None:
    tokenizer = from_metadata(metadata(), name="m")
    assert tokenizer.encode("<s><u>") == [0, 1]
    assert tokenizer.decode([0, 1]) == "<u>"  # control tokens are skipped, users' are not
    assert tokenizer.decode([0, 1], skip_special_tokens=False) == "<s><u>"


def test_begin_token_is_added_as_the_file_says() -> None:
    plain = from_metadata(metadata(), name="m").encode("a")
    for data in (metadata(add_bos_token=True), metadata(pre="llama-bpe")):
        tokenizer = from_metadata(data, name="m")
        assert tokenizer.encode("a") == [0, *plain]
        assert tokenizer.encode("a", add_special_tokens=False) == plain
    assert (
        from_metadata(metadata(pre="llama-bpe", add_bos_token=False), name="m").encode("a") == plain
    )


def test_llama3_takes_whole_tokens_first() -> None:
    # "aaa" is a token that no merge makes.
    assert len(from_metadata(metadata(), name="m").encode("aaa")) == 2
    ids = from_metadata(metadata(pre="llama-bpe"), name="m").encode("aaa", False)
    assert len(ids) == 1


def test_qwen2_composes_characters() -> None:
    qwen = from_metadata(metadata(pre="qwen2"), name="m")
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "tekken"}, "m: GGUF pre-tokenizer 'tekken' is not supported; supported: default"),
        ({"model": "llama"}, "m: GGUF tokenizer model 'llama' is not supported"),
        ({"model": None}, "m: has no tokenizer"),
        ({"merges": ["a zz"]}, "m: damaged tokenizer"),
        ({"merges": ["a"]}, "m: damaged tokenizer"),
    ],
)
def test_refused_gguf_tokenizers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JspecError, match=message):
        from_metadata(metadata(**changes), name="m")


def test_missing_gguf_tokens() -> None:
    data = metadata()
    del data["tokenizer.ggml.tokens"]
    with pytest.raises(JspecError, match=r"'tokenizer\.ggml\.tokens' is missing"):
        from_metadata(data, name="m")


def test_padding_and_truncation_of_the_file_are_dropped(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    data = json.loads(file.read_text())
    data["truncation"] = {
        "max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"
    }  # fmt: skip
    file.write_text(json.dumps(data))
    assert len(Tokenizer.load(tmp_path).encode("hello hello hello")) > 2


def test_tokens_that_only_the_config_adds(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    data = json.loads(file.read_text())
    data["added_tokens_decoder"] = {
        "265": {"content": "<tool>", "special": True, "normalized": False, "lstrip": False,
                "rstrip": False, "single_word": False}
    }  # fmt: skip
    file.write_text(json.dumps(data))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a<tool>")[-1] == 265
    tokenizer.save(tmp_path / "copy")
    assert Tokenizer.load(tmp_path / "copy").encode("a<tool>")[-1] == 265


def test_a_folder_with_slow_files_only(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """No tokenizer.json: transformers makes the same tokenizer from vocab.json and merges.txt."""
    model = json.loads(tokenizer.backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    slow = Tokenizer.load(tmp_path)
    assert slow.encode("hello world") == tokenizer.encode("hello world")
    assert slow.eos_token_id == 2


@pytest.mark.parametrize("text", ["", "{", '{"version": "1.0"}'])
def test_damaged_tokenizer_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(JspecError, match=r"tokenizer\.json: damaged") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    return Tokenizer(tokenizer.backend, tokenizer.config, template)


def test_templates_see_what_transformers_gives_them(tokenizer: Tokenizer) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%%') }}{{ eos_token }}{{ tools is none }}"
    )
    messages = [{"role": "user", "content": "<é>"}] * 3
    one = '{"role": "user", "content": "<é>"}'
    text = with_template(tokenizer, template).apply_chat_template(messages)
    # Lines that hold only a block are gone, as trim_blocks and lstrip_blocks have it.
    assert text == f"<|im_start|>{one}{one}%<|im_end|>True"


def test_templates_are_sandboxed(tokenizer: Tokenizer) -> None:
    template = "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"
    with pytest.raises(JspecError, match="chat template"):
        with_template(tokenizer, template).apply_chat_template([])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no systems') }}", "refuses these messages: no systems"),
        ("{% if %}", "chat template"),
        ("{{ messages[0]['role'] + 1 }}", "chat template"),
        (None, "has no chat template"),
    ],
)
def test_template_errors(tokenizer: Tokenizer, template: str | None, message: str) -> None:
    with pytest.raises(JspecError, match=message):
        with_template(tokenizer, template).apply_chat_template([{"role": "user", "content": ""}])


def test_where_templates_come_from(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    data = json.loads(file.read_text())
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    file.write_text(json.dumps({**data, "chat_template": named}))
    assert Tokenizer.load(tmp_path).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("j")
    assert Tokenizer.load(tmp_path).chat_template == "j"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text('{"chat_template": "js"}')
    assert Tokenizer.load(tmp_path).chat_template == "js"


def sentencepiece_like() -> Tokenizer:
    """Byte fallback and a leading space that decoding strips, as in Llama 2."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    tokens = ["<unk>", "</s>", "\u2581", "a", "b", "\u2581a", *(f"<0x{b:02X}>" for b in range(256))]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocab, [("\u2581", "a")], byte_fallback=True, unk_token="<unk>")
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, {})


def test_half_characters_wait(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\U0001f642b")
    assert len(ids) == 6
    stream = Detokenizer(tokenizer)
    assert [stream.push([i]) for i in ids] == ["a", "", "", "", "\U0001f642", "b"]
    assert stream.flush() == ""


def test_flush_gives_what_never_became_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\U0001f642")[:-1]
    stream = Detokenizer(tokenizer)
    assert stream.push(ids) == "a"
    assert stream.flush() == tokenizer.decode(ids)[1:]
    assert stream.push(tokenizer.encode("b")) == "b"  # ready for another sequence


def test_special_tokens_are_skipped_or_not(tokenizer: Tokenizer) -> None:
    assert Detokenizer(tokenizer).push([1, 2]) == ""
    assert Detokenizer(tokenizer, skip_special_tokens=False).push([1]) == "<|im_start|>"


def test_a_run_of_byte_tokens_goes_on_behind_a_skipped_token() -> None:
    tokenizer = sentencepiece_like()
    valid, stray = tokenizer.encode("\u1000")[-3:], tokenizer.backend.token_to_id("<0x80>")
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(valid), stream.push([1]), stream.push([stray])]
    assert pieces == ["", "", ""]
    assert stream.flush() == tokenizer.decode([*valid, 1, stray]) == "\ufffd" * 4


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@given(data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_pieces_add_up(tokenizer: Tokenizer, kind: str, data: st.DataObject) -> None:
    used = tokenizer if kind == "byte level" else sentencepiece_like()
    text = st.text(alphabet="ab \u00e9\ud55c\U0001f642\ufffd", max_size=4).map(used.encode)
    random = st.lists(st.integers(0, used.vocab_size - 1), max_size=4)
    chunks = data.draw(st.lists(st.one_of(text, random, text.map(lambda ids: ids[:-1]))))
    skip = data.draw(st.booleans())
    stream = Detokenizer(used, skip_special_tokens=skip)
    got = [stream.push(chunk) for chunk in chunks]
    ids = [i for chunk in chunks for i in chunk]
    assert "".join(got) + stream.flush() == used.decode(ids, skip_special_tokens=skip)
    # One id at a time gives the same, and hardly waits: only half characters are kept back.
    stream = Detokenizer(used, skip_special_tokens=skip)
    assert "".join(stream.push([i]) for i in ids) + stream.flush() == "".join(
        [used.decode(ids, skip_special_tokens=skip)]
    )


def test_the_window_stays_small(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    decode = Tokenizer.decode

    def measured(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", measured)
    stream = Detokenizer(tokenizer)
    for index in tokenizer.encode("hello world " * 100):
        stream.push([index])
    assert longest <= 4
