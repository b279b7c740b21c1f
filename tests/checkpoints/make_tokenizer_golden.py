"""Writes tokenizer_golden.json: what SmolLM2's tokenizer makes of a set of awkward texts.

Run by hand, with transformers and torch, on the GGUF file of the packaged model:

    python make_tokenizer_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

The reference is transformers' own reading of the file, with one correction. transformers ignores
`tokenizer.ggml.pre` and splits every GPT-2-like vocabulary with the plain GPT-2 expression. The
file says "smollm", for which llama.cpp splits single digits (`\\p{N}`) off first, as the original
tokenizer.json does (`Digits(individual_digits=True)` before `ByteLevel`). SmolLM2's merges hold no
digits, so most texts come out the same; they differ where white space precedes a digit, such as
in "x  1": GPT-2 keeps one space with the digit and leaves the other alone, SmolLM2 has one token
of two spaces. `differs_uncorrected` in the output lists the texts where the correction matters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "Hello 123 world 4567",
    "x  1",
    "a   12   b\t\t34\n\n  56",
    "3.14159 1,000,000 0x1F 1e-5 ²³ Ⅷ ٣٤ ½",
    "def f(x):\n    if x:\n\t\treturn x[0:10]  # done\n    return {'a': 1}\n",
    "for (int i = 0; i < n; ++i) { sum += a[i]; }\r\n",
    "안녕하세요, 세계! 한국어 문장입니다.",
    "日本語のテキスト 中文文本。",
    "emoji 🙂👨‍👩‍👧‍👦🇰🇷 \u200d done",
    "cafe\u0301 caf\u00e9 \ufb01 \u00df \u0130",
    "I'll we've they're IT'S don't",
    "trailing spaces   ",
    "   leading spaces",
    "line\n\n\n\nbreaks \n \n x",
    "\u00a0no-break\u3000ideographic",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name>x<file_sep>y <|im_end |> <|im_start|",
    "https://example.com/a?b=1&c=%20#d",
    "ALLCAPS CamelCase snake_case kebab-case",
    "\x00\x01\x7f \ufffd \U0001f9ff",
    "!!!???...---***///\\\\\\",
]
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "안녕 <b>&</b> 'x'"},
    ],
]


def main(gguf_file: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    uncorrected = [tokenizer.encode(text) for text in TEXTS]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), tokenizer.backend_tokenizer.pre_tokenizer]
    )
    texts = [
        {
            "text": text,
            "ids": tokenizer.encode(text),
            "decoded": tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True),
            "decoded_with_special": tokenizer.decode(tokenizer.encode(text)),
        }
        for text in TEXTS
    ]
    chats = [
        {
            "messages": chat,
            "add_generation_prompt": add,
            "text": tokenizer.apply_chat_template(chat, add_generation_prompt=add, tokenize=False),
        }
        for chat in CHATS
        for add in (True, False)
    ]
    golden = {
        "texts": texts,
        "chats": chats,
        "differs_uncorrected": [
            entry["text"]
            for entry, ids in zip(texts, uncorrected, strict=True)
            if entry["ids"] != ids
        ],
    }
    output = Path(__file__).with_name("tokenizer_golden.json")
    output.write_text(json.dumps(golden, ensure_ascii=True, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
