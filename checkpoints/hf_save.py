"""A model written as a folder in the Hugging Face layout, for jspec and for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.conversion import file_shape
from checkpoints.files import write_json
from checkpoints.folder import CONFIG_FILE, publish, refuse_existing, temporary_sibling
from checkpoints.hf_layers import kinds_to_json
from checkpoints.names import llama
from checkpoints.tokenizer import Tokenizer
from jspec.config import ModelConfig, RopeScaling
from jspec.errors import JspecError
from jspec.params import Params, leaf_paths, param_specs

WEIGHTS = "model.safetensors"

_ROPE_FIELDS = {
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def save_model(
    folder: str | Path, config: ModelConfig, params: Params, *, tokenizer: Tokenizer | None = None
) -> None:
    """`folder` holds the model: config.json, model.safetensors, each array in its own dtype, and
    the files of `tokenizer` if there is one.

    The folder appears whole or not at all. JspecError when there is one already, when it cannot
    be written, or when `params` are not those of `config`.
    """
    dest = Path(folder).expanduser().absolute()
    refuse_existing(dest)
    specs, arrays = dict(leaf_paths(param_specs(config))), dict(leaf_paths(params))
    tensors = {}
    for leaf in specs.keys() | arrays.keys():
        if leaf not in specs or leaf not in arrays or specs[leaf].shape != arrays[leaf].shape:
            raise JspecError(f"{leaf!r}: not the same in the model's config and in its params")
        array = np.asarray(arrays[leaf]).reshape(file_shape(specs[leaf]))
        tensors[llama.HF.file_name(leaf)] = array
    try:
        with temporary_sibling(dest) as partial:
            write_tensors(partial / WEIGHTS, tensors)
            if tokenizer is not None:
                tokenizer.save(partial)
            write_json(partial / CONFIG_FILE, _settings(config, str(params.embed.dtype)))
            publish(partial, dest)
    except OSError as error:
        raise JspecError(f"{dest}: cannot be written ({error.strerror or error})") from error


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """`path` is a safetensors file of `tensors`, in the order of their names."""
    from safetensors.numpy import save_file

    whole = {name: np.ascontiguousarray(array) for name, array in sorted(tensors.items())}
    save_file(whole, path, metadata={"format": "pt"})  # transformers asks for it


def _settings(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json: what `hf_config.model_config` makes `config` of again."""
    eos = config.eos_token_ids
    return layer_settings(config) | {
        "architectures": [_architecture(config)],
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "torch_dtype": dtype,
    }


def _architecture(config: ModelConfig) -> str:
    """The one that has just these biases and norms. JspecError where there is none."""
    if config.qk_norm:
        name, biases = "Qwen3ForCausalLM", (config.out_bias, config.out_bias, False)
    elif config.qkv_bias and not config.out_bias:
        name, biases = "Qwen2ForCausalLM", (True, False, False)
    else:
        name, biases = "LlamaForCausalLM", (config.out_bias, config.out_bias, config.mlp_bias)
    if biases != (config.qkv_bias, config.out_bias, config.mlp_bias):
        raise JspecError("no architecture on Hugging Face has biases where this model has")
    return name


def layer_settings(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that a model and a head share."""
    return {
        "model_type": _model_type(config),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope(config.rope_scaling),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        **kinds_to_json(config),
    }


def _model_type(config: ModelConfig) -> str:
    """The one whose layers are most like these."""
    if config.latent is not None:
        return "deepseek_v3"
    if config.experts is not None:
        return "glm4_moe" if config.experts.scoring_func == "sigmoid" else "qwen3_moe"
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.qkv_bias and not config.out_bias else "llama"


def _rope(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields = ("factor", *_ROPE_FIELDS.get(scaling.kind, ()))
    found = {field: getattr(scaling, field) for field in fields}
    return {"rope_type": scaling.kind} | {k: v for k, v in found.items() if v is not None}
