"""Computes the golden data with torch and transformers, as an implementation not our own.

    python tests/golden/make_goldens.py /path/to/SmolLM2-135M-Instruct.Q4_1.gguf

Made with Python 3.11, torch 2.13.0 (CPU), transformers 5.24.0, gguf 0.19.0, accelerate 1.15.0,
numpy 2.4.6. The tests only read the files (see `load.py` for their fields):

- `smollm2.npz`: the default model in float32 on five prompts: largest logits, log-sum-exp and
  fixed columns at every position, and 64 greedy tokens.
- `families.json`, `families.npz`: tiny random models of each architecture and position scaling.
  Weights come from `weights.py`, logits are those of one call over all tokens, except for
  `dynamic` scaling: its frequencies grow with the longest position of a call, so there the tokens
  are fed one at a time through the cache, and the key at position t keeps the frequencies of a
  context of t + 1 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import prompts
import torch
import transformers
from weights import golden_weights

FOLDER = Path(__file__).parent
TOP = 32
COLUMNS = 64
GREEDY_TOKENS = 64
SMALLEST_GAP = 1e-3
"""A greedy choice closer than this would depend on the order of float32 sums."""


def main() -> None:
    """Writes the three files next to this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    gguf = parser.parse_args().gguf
    with torch.inference_mode():
        write_families()
        np.savez_compressed(FOLDER / "smollm2.npz", **smollm2_arrays(gguf))


# --- the default model -------------------------------------------------------------------------


def smollm2_arrays(gguf: Path) -> dict[str, np.ndarray]:
    """The arrays of `smollm2.npz`, keyed `<case>.<field>`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    vocab_size = model.config.vocab_size
    columns = np.sort(np.random.default_rng(0).choice(vocab_size, COLUMNS, replace=False))
    arrays: dict[str, np.ndarray] = {
        "column_ids": columns.astype(np.int32),
        "gguf_sha256": np.array(hashlib.sha256(gguf.read_bytes()).hexdigest()),
    }
    for name, text in prompt_texts(tokenizer).items():
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        fields = {"text": np.array(text), "token_ids": np.array(token_ids, np.int32)}
        fields |= logit_fields(model, token_ids, columns) | greedy_fields(model, token_ids, name)
        arrays |= {f"{name}.{field}": value for field, value in fields.items()}
        gap = fields["greedy_gaps"].min()
        written = tokenizer.decode(fields["greedy_ids"])
        print(f"{name}: {len(token_ids)} tokens, smallest gap {gap:.4f}, {written!r}")
    return arrays


def prompt_texts(tokenizer: Any) -> dict[str, str]:
    """The text of each prompt by case name."""
    question = [{"role": "user", "content": prompts.CHAT_QUESTION}]
    return {
        "chat": tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True),
        "code": prompts.PYTHON,
        "korean": prompts.KOREAN,
        "table": prompts.TABLE,
        "passage": prompts.PASSAGE,
    }


def logit_fields(model: Any, token_ids: list[int], columns: np.ndarray) -> dict[str, np.ndarray]:
    """The largest logits, their log-sum-exp and the fixed columns at every position."""
    logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    top = logits.topk(TOP)
    return {
        "top_ids": top.indices.int().numpy(),
        "top_logits": top.values.numpy(),
        "logsumexp": logits.double().logsumexp(-1).float().numpy(),
        "column_logits": logits[:, torch.from_numpy(columns)].numpy(),
    }


def greedy_fields(model: Any, token_ids: list[int], name: str) -> dict[str, np.ndarray]:
    """The greedy continuation (cached decoding, then checked by one uncached call) and its gaps."""
    cache, new, written = None, token_ids, []
    for _ in range(GREEDY_TOKENS):
        output = model(torch.tensor([new]), cache=cache, use_cache=True)
        cache, new = output.cache, [int(output.logits[0, -1].argmax())]
        written += new
    whole = torch.tensor([token_ids + written[:-1]])
    logits = model(whole, use_cache=False, logits_to_keep=GREEDY_TOKENS).logits[0]
    best = logits.topk(2)
    gaps = (best.values[:, 0] - best.values[:, 1]).numpy()
    if best.indices[:, 0].tolist() != written or gaps.min() < SMALLEST_GAP:
        raise ValueError(f"a near tie in {name=}: {gaps.min()=}; choose another prompt")
    return {"greedy_ids": np.array(written, np.int32), "greedy_gaps": gaps}


# --- the tiny models ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Family:
    """How to build one tiny model."""

    architecture: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_tokens: int = 24
    one_at_a_time: bool = False
    old_style: bool = False
    """Store the config with `rope_theta`, `rope_scaling` and no `head_dim`, as in older files."""


TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONG = 96
"""Tokens of the scaled cases: three times the context they claim to be trained on."""


def scaled(kind: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    """Rotary settings that stretch a context of 32 tokens by 4."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, "factor": 4.0} | more}


LLAMA3 = scaled(
    "llama3",
    theta=100.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = scaled("yarn", original_max_position_embeddings=32)
YARN_FULL = scaled(
    "yarn",
    theta=100.0,
    original_max_position_embeddings=32,
    beta_fast=4.0,
    beta_slow=0.5,
    mscale=1.0,
    mscale_all_dim=0.5,
    truncate=False,
)
DYNAMIC = scaled("dynamic") | {"max_position_embeddings": 32}

FAMILIES = {
    "llama": Family("Llama", {"vocab_size": 97, "num_hidden_layers": 3}),
    "llama_tied": Family("Llama", {"tie_word_embeddings": True}),
    "llama_bias": Family("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads": Family("Llama", {"head_dim": 16}),
    "llama_group_1": Family("Llama", {"num_key_value_heads": 4}),
    "llama_group_4": Family("Llama", {"num_key_value_heads": 1}),
    "llama_linear": Family("Llama", scaled("linear"), LONG),
    "llama_linear_old_style": Family("Llama", scaled("linear"), LONG, old_style=True),
    "llama_dynamic": Family("Llama", DYNAMIC, LONG, one_at_a_time=True),
    "llama_llama3": Family("Llama", LLAMA3, LONG),
    "llama_llama3_old_style": Family("Llama", LLAMA3, LONG, old_style=True),
    "llama_yarn": Family("Llama", YARN, LONG),
    "llama_yarn_full": Family("Llama", YARN_FULL | {"head_dim": 16}, LONG),
    "mistral": Family("Mistral", {"sliding_window": None}),
    "qwen2": Family("Qwen2", {"rms_norm_eps": 1e-6, "tie_word_embeddings": True}),
    "qwen3": Family("Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-6}),
}

KEPT = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "bos_token_id",
    "eos_token_id",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
)


def write_families() -> None:
    """Writes `families.json` (config and parameters) and `families.npz` (token ids and logits)."""
    described, arrays = {}, {}
    for name, family in FAMILIES.items():
        model = build(family)
        shapes = sorted((key, list(value.shape)) for key, value in model.named_parameters())
        weights = golden_weights(shapes)
        model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=False)
        token_ids = np.random.default_rng(7).integers(0, TINY["vocab_size"], family.num_tokens)
        arrays[f"{name}.token_ids"] = token_ids.astype(np.int32)
        arrays[f"{name}.logits"] = family_logits(model, torch.from_numpy(token_ids), family)
        described[name] = {"config": stored_config(model.config, family), "parameters": shapes}
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in described.items())
    (FOLDER / "families.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    np.savez_compressed(FOLDER / "families.npz", **arrays)


def build(family: Family) -> Any:
    """The model, with whatever weights transformers draws."""
    config_class = getattr(transformers, f"{family.architecture}Config")
    model_class = getattr(transformers, f"{family.architecture}ForCausalLM")
    # Each class of config has defaults of its own: state every setting.
    settings = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False} | TINY | family.settings
    settings.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
    config = config_class(**settings, attn_implementation="eager")
    config.architectures = [model_class.__name__]
    return model_class(config).float().eval()


def family_logits(model: Any, token_ids: torch.Tensor, family: Family) -> np.ndarray:
    """Float32 `[T, V]`."""
    if not family.one_at_a_time:
        return model(token_ids[None], use_cache=False).logits[0].numpy()
    cache, rows = None, []
    for token in token_ids:
        output = model(token[None, None], cache=cache, use_cache=True)
        cache = output.cache
        rows.append(output.logits[0, 0])
    return torch.stack(rows).numpy()


def stored_config(config: Any, family: Family) -> dict[str, Any]:
    """What a config.json of the model says, less the settings that no decoder reads."""
    whole = config.to_dict()
    kept = {key: whole[key] for key in KEPT if key in whole}
    if family.old_style:
        del kept["head_dim"]
        scaling = dict(kept.pop("rope_parameters"))
        kept["rope_theta"] = scaling.pop("rope_theta")
        if scaling["rope_type"] == "linear":  # the oldest files name it "type"
            scaling["type"] = scaling.pop("rope_type")
        kept["rope_scaling"] = scaling
    return kept


if __name__ == "__main__":
    main()
