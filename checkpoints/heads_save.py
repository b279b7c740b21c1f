"""Draft heads written in the public layout of their family, for jspec and for others.

EAGLE's names for `eagle`, EAGLE-3's and SpecForge's for `eagle3`, Qwen3-Next's for `mtp` or, if it
is a NextN layer, DeepSeek's (with the number 0, as in files that hold nothing else), Medusa's for
`medusa`, and for `exits` our own. Norms are written as they multiply, never less one; `model_type`
is none that means the other. Knows nothing of how heads compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.conversion import file_shape, parts_in_file
from checkpoints.files import write_json
from checkpoints.folder import CONFIG_FILE, publish, refuse_existing, temporary_sibling
from checkpoints.heads_config import OURS, config_to_json
from checkpoints.heads_vocabulary import to_offsets
from checkpoints.hf_save import WEIGHTS, layer_settings, write_tensors
from checkpoints.names.heads import (
    EAGLE,
    EAGLE3,
    JOINED_NORM,
    MEDUSA,
    MTP,
    HeadNames,
    exits,
    nextn,
)
from jspec.errors import JspecError
from jspec.head_params import (
    AnyConfig,
    AnyParams,
    ExitsConfig,
    HeadConfig,
    MedusaConfig,
    specs_of,
)
from jspec.params import leaf_paths

_NAMES = {"eagle": EAGLE, "eagle3": EAGLE3, "mtp": MTP, "medusa": MEDUSA}
_ARCHITECTURES = {
    "eagle": "LlamaForCausalLM",  # as EAGLE's own files have it
    "eagle3": "LlamaForCausalLMEagle3",
    "mtp": "MTPDraftModel",
}
_SHARES_LM_HEAD = {"eagle": True, "mtp": True, "eagle3": False, "medusa": False, "exits": True}


def save_head(
    folder: str | Path,
    config: AnyConfig,
    params: AnyParams,
    *,
    shares_embed: bool = True,
    shares_lm_head: bool | None = None,
) -> None:
    """`folder` holds the head: config.json and model.safetensors, each array in its own dtype.

    What is the target's is left out, and `load_head` takes it from the target: the embedding (if
    `shares_embed`, and the head is as wide as its target), and the output head if
    `shares_lm_head`; None means that all share it but `eagle3` and `medusa`
    (other engines want theirs in the file).
    A vocabulary of its own is written as d2t and t2d, whatever the family. config.json also has
    all fields of `config` under "jspec", so that `load_head` gives back the same.

    The folder appears whole or not at all. JspecError when there is one already, when it cannot
    be written, or when `params` are not those of `config`.
    """
    dest = Path(folder).expanduser().absolute()
    refuse_existing(dest)
    if shares_lm_head is None:
        shares_lm_head = _SHARES_LM_HEAD[config.family]
    wide = not isinstance(config, HeadConfig) or (
        config.layers.hidden_size == config.target_hidden_size
    )
    left_out = ("embed",) * (shares_embed and wide) + ("lm_head", "lm_heads") * shares_lm_head
    tensors = dict(_tensors(config, params, left_out))
    dtype = next(str(x.dtype) for x in tensors.values() if x.dtype not in (np.int64, np.bool_))
    try:
        with temporary_sibling(dest) as partial:
            write_tensors(partial / WEIGHTS, tensors)
            write_json(partial / CONFIG_FILE, _settings(config, dtype))
            publish(partial, dest)
    except OSError as error:
        raise JspecError(f"{dest}: cannot be written ({error.strerror or error})") from error


def _names(config: AnyConfig) -> HeadNames:
    if isinstance(config, ExitsConfig):
        return exits(config.layers)
    return nextn("0") if _is_nextn(config) else _NAMES[config.family]


def _is_nextn(config: AnyConfig) -> bool:
    """Whether it is a NextN layer as DeepSeek's or GLM's, not Qwen's MTP."""
    return isinstance(config, HeadConfig) and config.skips_first_embedding


def _tensors(
    config: AnyConfig, params: Any, left_out: tuple[str, ...]
) -> Iterator[tuple[str, np.ndarray]]:
    """Name in the file and numbers of each array that is not left out."""
    names, specs = _names(config), dict(leaf_paths(specs_of(config)))
    arrays = dict(leaf_paths(params))
    for leaf in specs.keys() ^ arrays.keys():
        raise JspecError(f"{leaf!r} is in only one of the head's config and params")
    joined = isinstance(config, HeadConfig) and config.norm_before_fc
    for leaf, array in arrays.items():
        if array.shape != specs[leaf].shape:
            raise JspecError(
                f"{leaf!r} of the head has shape {list(array.shape)}, "
                f"but its config needs {list(specs[leaf].shape)}"
            )
        if leaf == "token_ids":
            yield from to_offsets(np.asarray(array), config.vocab_size).items()
        elif leaf.partition(".")[0] not in left_out:
            written = JOINED_NORM if joined and leaf == "fc_norms.0" else leaf
            parts = parts_in_file(written, specs[leaf])
            whole = np.asarray(array).reshape(len(parts), *file_shape(parts[0][1]))
            for (part, _), numbers in zip(parts, whole, strict=True):
                yield _named(names, part), numbers


def _named(names: HeadNames, leaf: str) -> str:
    try:
        return names.file_name(leaf)
    except KeyError as error:
        raise JspecError(f"{leaf!r}: the layout {names.layout} has no name for it") from error


def _settings(config: AnyConfig, dtype: str) -> dict[str, Any]:
    """config.json: what others read, and all of `config` under `OURS`."""
    if isinstance(config, HeadConfig):
        public = _public(config)
    elif isinstance(config, MedusaConfig):
        public = _medusa(config)
    else:
        public = {"architectures": ["JspecExits"], "model_type": "jspec_exits"}
    return public | {"torch_dtype": dtype, OURS: config_to_json(config)}


def _medusa(config: MedusaConfig) -> dict[str, Any]:
    """Medusa's own keys, and vLLM's."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": 1,
        "medusa_fc_bias": True,
        "num_heads": config.num_heads,
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
    }


def _public(config: HeadConfig) -> dict[str, Any]:
    settings = {
        "architectures": [_ARCHITECTURES[config.family]],
        **layer_settings(config.layers),
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size,
    }
    if config.family == "mtp":
        if _is_nextn(config):
            settings["architectures"] = ["DeepseekV3ForCausalLMNextN"]  # SGLang's, of such files
        return settings | {"num_nextn_predict_layers": 1}
    if config.family == "eagle":
        return settings | {"bias": config.fc_bias}
    settings |= {
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.feeds_normed,
    }
    if min(config.taps) >= 0:  # others know no other
        # Inputs of layers: vLLM reads the first, SGLang the second.
        ids = {"eagle_aux_hidden_state_layer_ids": list(config.taps)}
        settings |= ids | {"eagle_config": ids | {"use_aux_hidden_state": True}}
    return settings
