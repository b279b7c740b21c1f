"""config.json of a draft head -> HeadConfig, MedusaConfig or ExitsConfig, whoever wrote it.

What tensors tell (biases, norms of single heads, how many layers, heads and draft tokens) is taken
from them: configs are copied from the target's and often wrong there. Knows nothing of arrays.

Which hidden states a head reads (`taps`): EAGLE-3 reads the inputs of layers 2, L // 2 and L - 3
unless `eagle_aux_hidden_state_layer_ids` says otherwise. Those ids are inputs, too, for vLLM and
speculators; SpecForge and SGLang count outputs, and SGLang tells the two apart by the first id,
which is 1 (an output) or 2 (the same state as an input) in heads that exist (sglang PR 25454).
Here: ids that begin with 1 are outputs, except in speculators' files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, cast

from checkpoints.folder import config_from_json
from checkpoints.heads_source import HeadSource, settings_file
from checkpoints.hf_config import model_config
from checkpoints.hf_layers import as_llamas, kinds_of
from checkpoints.names.heads import JOINED_NORM, exit_layers
from checkpoints.tensors import FileTensor
from jspec.config import ModelConfig
from jspec.errors import JspecError
from jspec.head_params import AnyConfig, ExitsConfig, HeadConfig, MedusaConfig

OURS, FORMAT = "jspec", 1
"""Key of config.json with all fields of the config, and the version of its format."""

Leaves = Mapping[str, FileTensor]


def config_of(
    head: HeadSource, leaves: Leaves, target: ModelConfig, draft_vocab_size: int
) -> AnyConfig:
    """The static shape of `head`. JspecError when settings are invalid, or for another target."""
    found = _ours(head)
    if found is None and head.names.family == "medusa":
        found = _medusa(head, leaves, target, draft_vocab_size)
    elif found is None and head.names.family == "exits":
        found = _exits(head, leaves, target, draft_vocab_size)
    elif found is None:
        try:
            found = _from_settings(head, leaves, target, draft_vocab_size)
        except JspecError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            name = settings_file(head.path)
            raise JspecError(f"{name}: invalid settings of a head: {error}") from error
    _check_target(head, found, target)
    if found.draft_vocab_size != draft_vocab_size:
        raise JspecError(
            f"{head.path}: its tensors know {draft_vocab_size} tokens, "
            f"but its config.json {found.draft_vocab_size}; fetch the head again"
        )
    return found


def config_to_json(config: AnyConfig) -> dict[str, Any]:
    """All fields, for the key `OURS`."""
    return {"format": FORMAT, "family": config.family, **dataclasses.asdict(config)}


def layer_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes decoder layers."""
    nested = (settings.get(key) for key in ("transformer_layer_config", "text_config"))
    return next((part for part in nested if isinstance(part, dict)), settings)


def _ours(head: HeadSource) -> AnyConfig | None:
    """What `config_to_json` wrote, if we wrote the file."""
    data = head.settings.get(OURS)
    if data is None:
        return None
    name = settings_file(head.path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise JspecError(f"{name}: written by another version of jspec; save the head again")
    if data.get("family") != head.names.family:
        raise JspecError(
            f"{name}: says family {data.get('family')!r}, but the tensors are those of "
            f"{head.names.family!r}; fetch the head again"
        )
    fields = {key: value for key, value in data.items() if key != "format"}
    try:
        if fields["family"] == "medusa":
            del fields["family"]
            return MedusaConfig(**fields)
        if fields["family"] == "exits":
            del fields["family"]
            return ExitsConfig(layers=tuple(fields.pop("layers")), **fields)
        layers, taps = config_from_json(fields.pop("layers")), tuple(fields.pop("taps"))
        return HeadConfig(layers=layers, taps=taps, **fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise JspecError(f"{name}: invalid ({error}); save the head again") from error


def _medusa(
    head: HeadSource, leaves: Leaves, target: ModelConfig, draft_vocab_size: int
) -> MedusaConfig:
    return MedusaConfig(
        num_heads=_count(leaves, "blocks."),
        hidden_size=_first_axis(head, leaves, "blocks.0"),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
    )


def _exits(
    head: HeadSource, leaves: Leaves, target: ModelConfig, draft_vocab_size: int
) -> ExitsConfig:
    layers = exit_layers(head.tensors)
    if layers[0] == 0:
        raise JspecError(f"{head.path}: an exit behind 0 layers; exits are behind 1 or more")
    return ExitsConfig(
        layers=layers,
        hidden_size=_first_axis(head, leaves, "blocks.0"),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
    )


def _from_settings(
    head: HeadSource, leaves: Leaves, target: ModelConfig, draft_vocab_size: int
) -> HeadConfig:
    """From a config.json in the layout of the head's trainer."""
    name, settings, layout = str(settings_file(head.path)), head.settings, head.names.layout
    if not settings:
        raise JspecError(f"{name}: no such file; a head of the family {layout} needs it")
    _check_vocabulary(name, layer_settings(settings), target)
    layers = _layers(head, leaves, target)
    if layout in ("mtp", "nextn") and layers.num_hidden_layers > 1:
        raise JspecError(f"{head.path}: holds several MTP layers; only one is supported")
    config = HeadConfig(
        family=cast(Any, head.names.family),
        layers=layers,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=layers.hidden_size,
        fc_bias="fc_bias" in leaves or (layout == "eagle" and bool(settings.get("bias", True))),
        feeds_normed=layout == "mtp",  # as vLLM and speculators run Qwen3-Next's
        skips_first_embedding=layout == "nextn",
    )
    return _eagle3(name, config, settings, leaves, target) if layout == "eagle3" else config


def _eagle3(
    name: str,
    config: HeadConfig,
    settings: Mapping[str, Any],
    leaves: Leaves,
    target: ModelConfig,
) -> HeadConfig:
    """`config` with what only EAGLE-3 has."""
    nested = settings.get("eagle_config") or {}

    def flag(key: str) -> bool:
        return bool(settings.get(key, nested.get(key, False)))

    fc_norm = "fc_norms.0" in leaves or flag("fc_norm")
    norm_before_fc = JOINED_NORM in leaves or flag("norm_before_fc")
    if fc_norm and norm_before_fc:
        raise JspecError(f"{name}: both fc_norm and norm_before_fc; a head has one of them")
    if nested.get("use_aux_hidden_state") is False:
        raise JspecError(
            f"{name}: use_aux_hidden_state is false; EAGLE-3 heads without fused features are "
            "not supported"
        )
    return dataclasses.replace(
        config,
        target_hidden_size=int(settings.get("target_hidden_size") or config.target_hidden_size),
        taps=_taps(name, settings, nested, target.num_hidden_layers),
        norm_before_residual=flag("norm_before_residual"),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        feeds_normed=flag("norm_output"),
    )


def _taps(
    name: str, settings: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int
) -> tuple[int, ...]:
    """See above; all are inputs of layers of the target."""
    key = "eagle_aux_hidden_state_layer_ids"
    ids = settings.get(key) or nested.get(key)
    if not ids:
        taps = (2, num_layers // 2, num_layers - 3)
    else:
        are_outputs = ids[0] == 1 and "speculators_model_type" not in settings
        taps = tuple(int(i) + are_outputs for i in ids)
    if min(taps) < 0 or max(taps) >= num_layers:
        raise JspecError(
            f"{name}: the head reads the inputs of layers {_listed(taps)}, but the "
            f"target has layers 0 to {num_layers - 1}; give the head of this target"
        )
    return taps


def _layers(head: HeadSource, leaves: Leaves, target: ModelConfig) -> ModelConfig:
    """The head's decoder layers. Their context is at least the target's: EAGLE's configs say 2048
    and mean what they were trained on. (Dynamic scaling computes with it, and keeps it.)"""
    name = str(settings_file(head.path))
    data = {**layer_settings(head.settings), "vocab_size": target.vocab_size}
    # Layers are those of a Llama, but for what the tensors say below.
    data |= {"architectures": ["LlamaForCausalLM"], "quantization_config": None}
    fields = {leaf.split(".")[2] for leaf in leaves if leaf.startswith("layers.")}
    kinds = {}
    if head.names.family == "mtp":  # a layer of its target's; EAGLE's trainers know only Llama's
        kinds = kinds_of(data, fields, name=name)
        data = as_llamas(data, kinds)
    config = model_config(data, name=name)
    context = max(config.max_position_embeddings, target.max_position_embeddings)
    if config.rope_scaling is not None and config.rope_scaling.kind == "dynamic":
        context = config.max_position_embeddings
    return dataclasses.replace(
        config,
        num_hidden_layers=max(_count(leaves, "layers."), 1),
        max_position_embeddings=context,
        tie_word_embeddings=False,
        qkv_bias=not fields.isdisjoint(("q_bias", "k_bias", "v_bias")),
        out_bias="o_bias" in fields,
        mlp_bias=not fields.isdisjoint(("gate_bias", "up_bias", "down_bias")),
        qk_norm=not fields.isdisjoint(("q_norm", "k_norm")),
        bos_token_id=None,
        eos_token_ids=(),
        gated_attention=_is_gated(leaves, config),
        **kinds,
    )


def _is_gated(leaves: Leaves, layers: ModelConfig) -> bool:
    """Whether `q` has the rows of queries and of gates (Qwen3-Next's `attn_output_gate`)."""
    q = leaves.get("layers.0.q")
    return q is not None and q.shape[0] == 2 * layers.num_attention_heads * layers.head_dim


def _check_vocabulary(name: str, data: Mapping[str, Any], target: ModelConfig) -> None:
    found = data.get("vocab_size", target.vocab_size)
    if found != target.vocab_size:
        raise JspecError(
            f"{name}: the head is for a vocabulary of {found} tokens, but the target has "
            f"{target.vocab_size}; give the head of this target"
        )


def _check_target(head: HeadSource, config: AnyConfig, target: ModelConfig) -> None:
    _check_vocabulary(str(head.path), {"vocab_size": config.vocab_size}, target)
    width = config.target_hidden_size
    if width != target.hidden_size:
        raise JspecError(
            f"{head.path}: the head is for a target of width {width}, but the target's "
            f"hidden_size is {target.hidden_size}; give the head of this target"
        )
    if isinstance(config, ExitsConfig):
        _check_exits(head, config, target)
        return
    states = target.num_hidden_layers + 1
    if any(not -states <= tap < states for tap in config.taps):
        raise JspecError(
            f"{head.path}: the head reads the hidden states {_listed(config.taps)}, but the "
            f"target has {states}; give the head of this target"
        )


def _check_exits(head: HeadSource, config: ExitsConfig, target: ModelConfig) -> None:
    there = exit_layers(head.tensors)
    if there != config.layers:
        raise JspecError(
            f"{head.path}: its tensors are of exits behind {_listed(there)} layers, but its "
            f"config.json says {_listed(config.layers)}; fetch the head again"
        )
    if there[-1] >= target.num_hidden_layers:
        raise JspecError(
            f"{head.path}: has an exit behind {there[-1]} layers, but the target has only "
            f"{target.num_hidden_layers}; give the exits of this target"
        )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _count(leaves: Leaves, start: str) -> int:
    """How many entries the field that paths `start` with has: the largest number, and one."""
    numbers = (leaf.split(".")[1] for leaf in leaves if leaf.startswith(start))
    return max((int(number) + 1 for number in numbers), default=0)


def _first_axis(head: HeadSource, leaves: Leaves, leaf: str) -> int:
    tensor = leaves.get(leaf)
    if tensor is None or len(tensor.shape) != 2:
        raise JspecError(
            f"{head.path}: lacks the tensor {head.names.file_name(leaf)!r}, or it is no matrix; "
            "fetch the head again"
        )
    return tensor.shape[0]
