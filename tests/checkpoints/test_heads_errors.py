"""Draft heads that cannot be used: one line that names what is wrong and says what to do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import head_files as files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import write_hf
from head_files import IDS, TARGET, D, L, V, load, settings, write_head

from checkpoints import save_head
from jspec.config import ModelConfig
from jspec.errors import JspecError
from jspec.head_params import HeadConfig, init_head

EAGLE3 = settings(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(IDS))
IDS_KEY = "eagle_aux_hidden_state_layer_ids"


def refused(path: Path, message: str, **options: Any) -> None:
    with pytest.raises(JspecError, match=message) as caught:
        load(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(path))


# Not a head, or not one that can be run


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linear_attn.A_log", "linear attention"),
        ("linear_attn.conv1d.weight", "linear attention"),
    ],
)
def test_layers_of_other_kinds(tmp_path: Path, name: str, kind: str) -> None:
    name = f"model.layers.{L}.{name}"
    write_head(tmp_path, files.nextn() | {name: np.ones((2, 2), np.float32)}, settings())
    refused(tmp_path, rf"'{name}' belongs to {kind}, which is not supported")


def test_other_layers_of_the_model_do_not_matter(tmp_path: Path) -> None:
    experts = {"model.layers.3.mlp.experts.0.up_proj.weight": np.ones((2, 2), np.float32)}
    load(write_head(tmp_path, files.nextn() | experts, settings()))


def test_kinds_of_heads(tmp_path: Path) -> None:
    one = np.ones((2, 2), np.float32)
    plain = write_hf(tmp_path / "plain")
    refused(plain, r"no draft head \(architecture LlamaForCausalLM, first tensor 'lm_head.*EAGLE-3")
    write_head(tmp_path / "a", {"x": one}, {"speculators_model_type": "dflash"})
    refused(tmp_path / "a", "a speculator of the type 'dflash', which is not supported")
    tensors = files.medusa() | {"0.1.linear.weight": np.ones((D, D), np.float32)}
    write_head(tmp_path / "b", tensors, None, "medusa_lm_head.pt")
    refused(tmp_path / "b", r"'0\.1\.linear\.weight' belongs to a second residual block")
    write_head(tmp_path / "c", {f"blocks.0.layers.{i}.weight": one for i in (0, 1)}, {})
    refused(tmp_path / "c", r"'blocks\.0\.layers\.1\.weight' belongs to a second residual block")
    write_head(tmp_path / "d", files.eagle3() | {"mask_hidden": one}, EAGLE3)
    refused(tmp_path / "d", r"'mask_hidden' belongs to parallel drafting \(P-EAGLE\)")
    write_head(tmp_path / "e", files.nextn() | files.nextn(L + 1), settings())
    refused(tmp_path / "e", rf"2 MTP modules \('model\.layers\.{L}\.eh_proj")
    more = {n.replace("layers.0", "layers.1"): x for n, x in files.qwen_mtp().items()}
    write_head(tmp_path / "f", files.qwen_mtp() | more, settings())
    refused(tmp_path / "f", "several MTP layers")
    nested = settings(eagle_config={"use_aux_hidden_state": False})
    refused(write_head(tmp_path / "h", files.eagle3(), nested), "use_aux_hidden_state is false")
    both = {"fc_norm": True, "norm_before_fc": True}
    refused(write_head(tmp_path / "i", files.eagle3(), EAGLE3 | both), "both fc_norm and norm_b")


def test_settings_that_no_layer_has(tmp_path: Path) -> None:
    write_head(tmp_path, files.eagle(), settings(partial_rotary_factor=0.5))
    refused(tmp_path, "partial_rotary_factor 0.5 is not supported")
    write_head(tmp_path, files.eagle(), settings(hidden_act="gelu"))
    refused(tmp_path, "hidden_act 'gelu'")
    write_head(tmp_path, files.eagle(), settings(num_attention_heads=None))
    refused(tmp_path, "'num_attention_heads' is missing")
    write_head(tmp_path, files.eagle(), settings(rope_scaling={"type": "su", "factor": 2}))
    refused(tmp_path, "rope type 'su'")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, r"config\.json: no such file; a head of the family eagle needs it")


@pytest.mark.parametrize(
    "changes", [{IDS_KEY: ["first"]}, {"eagle_config": 3}, {"target_hidden_size": [D]}]
)
def test_settings_of_the_wrong_type(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_head(tmp_path, files.eagle3(), EAGLE3 | changes)
    refused(tmp_path, "invalid settings of a head")


# Damaged files


def test_places_without_weights(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "no such file or folder; give the folder")
    (tmp_path / "head.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "head.gguf", "not a file of a draft head")
    folder = write_head(tmp_path / "head", files.eagle(), settings())
    (folder / "model.safetensors").unlink()
    refused(folder, r"has no weights \(model\.safetensors, pytorch_model\.bin or medusa_lm_head")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"])
def test_truncated_files(tmp_path: Path, file: str) -> None:
    tensors = files.medusa() if file.startswith("medusa") else files.eagle()
    folder = write_head(tmp_path, tensors, settings(), file)
    (folder / file).write_bytes((folder / file).read_bytes()[:-500])
    refused(folder, "truncated")


def test_an_index_that_lies(tmp_path: Path) -> None:
    folder = write_head(tmp_path, files.eagle(), settings())
    index = folder / "model.safetensors.index.json"
    weight_map = dict.fromkeys(files.eagle(), "model.safetensors") | {"extra": "model.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, r"model\.safetensors: lacks 'extra', which the index says it holds")
    index.write_text(json.dumps({"weight_map": weight_map | {"extra": "gone.safetensors"}}))
    refused(folder, r"gone\.safetensors: missing, but listed")
    index.write_text("{}")
    refused(folder, "no weight_map")


def without(tensors: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {n: x for n, x in tensors.items() if n != name}


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        (files.eagle(), "fc.bias"),
        (files.eagle(), "layers.0.self_attn.q_proj.weight"),
        (files.eagle3(), "midlayer.input_layernorm.weight"),
        (files.eagle3(), "midlayer.hidden_norm.weight"),
        (files.eagle3(), "norm.weight"),
        (files.eagle3(2), "layers.1.input_layernorm.weight"),
        (files.qwen_mtp(), "mtp.pre_fc_norm_hidden.weight"),
        (files.nextn(), f"model.layers.{L}.enorm.weight"),
        (files.nextn(), f"model.layers.{L}.mlp.up_proj.weight"),
        (files.medusa(), "1.0.linear.weight"),
        (files.medusa(), "2.0.linear.bias"),
        (files.medusa(), "1.1.weight"),
    ],
)
def test_missing_tensors(tmp_path: Path, tensors: dict[str, np.ndarray], name: str) -> None:
    write_head(tmp_path, without(tensors, name), settings())
    refused(tmp_path, rf"lacks the tensor '{name}'")


def test_tensors_that_flags_ask_for(tmp_path: Path) -> None:
    write_head(tmp_path, files.eagle3(), EAGLE3 | {"norm_before_fc": True})
    refused(tmp_path, r"lacks the tensor 'input_norm\.weight'")
    write_head(tmp_path, files.eagle3(), EAGLE3 | {"fc_norm": True})
    refused(tmp_path, r"lacks the tensor 'fc_norm\.0\.weight'")
    bias = {"midlayer.self_attn.k_proj.bias": np.ones(16, np.float32)}
    write_head(tmp_path, files.eagle3() | bias, EAGLE3)
    refused(tmp_path, r"lacks the tensor 'midlayer\.self_attn\.q_proj\.bias'")
    write_head(
        tmp_path, files.eagle3(width=16), EAGLE3 | {"hidden_size": 16, "target_hidden_size": D}
    )
    refused(tmp_path, r"lacks the tensor 'embed_tokens\.weight'")


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        (files.eagle(), "layers.0.input_layernorm.weight"),
        (files.eagle(), "norm.weight"),
        (files.eagle(), "layers.00.mlp.up_proj.weight"),
        (files.eagle3(), "midlayer.mlp.middle.weight"),
        (files.eagle3(), "layers.1.hidden_norm.weight"),
        (files.qwen_mtp(), "mtp.shared.weight"),
        (files.nextn(), f"model.layers.{L}.self_attn.sinks"),
        (files.nextn(), f"model.layers.{L}.mlp.up_proj.weight_scale_inv"),
        (files.medusa(), "2.2.weight"),
    ],
)
def test_unknown_tensors(tmp_path: Path, tensors: dict[str, np.ndarray], name: str) -> None:
    write_head(tmp_path, tensors | {name: np.ones(D, np.float32)}, settings())
    refused(tmp_path, rf"unexpected tensor '{name}'")


@pytest.mark.parametrize(
    ("tensors", "name", "shape", "expected"),
    [
        (files.eagle(), "fc.weight", (D, D), [D, 2 * D]),
        (files.eagle(), "layers.0.self_attn.k_proj.weight", (8, D), [16, D]),
        (files.eagle3(), "fc.weight", (D, 2 * D), [D, 3 * D]),
        (files.eagle3(), "midlayer.self_attn.q_proj.weight", (32, D), [32, 2 * D]),
        (files.eagle3(), "lm_head.weight", (8, D), [9, D]),
        (files.qwen_mtp(), "mtp.norm.weight", (1, D), [D]),
        (files.medusa(), "1.0.linear.weight", (D, 1), [D, D]),
        (files.medusa(), "1.1.weight", (V + 1, D), [V, D]),
    ],
)
def test_wrong_shapes(tmp_path: Path, tensors: Any, name: str, shape: Any, expected: Any) -> None:
    write_head(tmp_path, tensors | {name: np.ones(shape, np.float32)}, settings())
    found = rf"'{name}' has shape \[{', '.join(map(str, shape))}\]"
    refused(tmp_path, rf"{found}, but \[{', '.join(map(str, expected))}\] is expected")


def test_other_damage(tmp_path: Path) -> None:
    twice = {"layers.0.mlp.up_proj.weight": files.eagle3()["midlayer.mlp.up_proj.weight"]}
    write_head(tmp_path, files.eagle3() | twice, EAGLE3)
    refused(tmp_path, r"up_proj\.weight' and '.*up_proj\.weight' are the same tensor")
    write_head(tmp_path, files.eagle() | {"fc.weight": np.ones((D, 2 * D), np.int32)}, settings())
    refused(tmp_path, r"'fc\.weight' has dtype int32; only float32")
    with pytest.raises(JspecError, match="unknown dtype 'int8'"):
        load(tmp_path, dtype="int8")


# Vocabularies


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": files.OFFSETS + 2}, r"tokens 2 to 40, but the target has 40"),
        ({"d2t": files.OFFSETS - 1}, r"tokens -1 to 37, but"),
        ({"d2t": np.array([0, 1, 1, 0, 7, 7, 7, 23, 30])}, "a token twice"),
        ({"d2t": files.OFFSETS.astype(np.float32)}, r"'d2t' is float32 of shape \[9\]"),
        ({"d2t": np.zeros(0, np.int64)}, "holds no token"),
        ({"d2t": np.eye(3, dtype=np.int64)}, r"'d2t' is int64 of shape \[3, 3\]"),
        ({"t2d": np.zeros(V, np.bool_)}, "'t2d' and 'd2t' name different tokens"),
        ({"t2d": np.arange(V) < 9}, "name different tokens"),
        ({"t2d": np.ones(V + 1, np.bool_)}, r"'t2d' has shape \[41\]"),
        ({"d2t": np.arange(V)[::-1] * 2 - V + 1}, "permutes the whole vocabulary"),
    ],
)
def test_draft_vocabularies(tmp_path: Path, changes: Any, message: str) -> None:
    write_head(tmp_path, files.eagle3() | {k: v.copy() for k, v in changes.items()}, EAGLE3)
    refused(tmp_path, message)


def test_half_a_vocabulary(tmp_path: Path) -> None:
    write_head(tmp_path, without(files.eagle3(), "d2t"), EAGLE3)
    refused(tmp_path, "has 't2d' but lacks 'd2t'")
    tensors = without(without(files.eagle3(), "d2t"), "t2d")
    refused(write_head(tmp_path, tensors, EAGLE3), "a vocabulary of its own needs 'd2t'")


# Of another target


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (files.eagle(), settings()),
        (files.eagle3(), EAGLE3),
        (files.qwen_mtp(), settings()),
        (files.medusa(), {}),
    ],
)
def test_another_target(tmp_path: Path, tensors: Any, config: Any) -> None:
    write_head(tmp_path, tensors, config)
    wide = dataclasses.replace(TARGET, hidden_size=48)
    refused(tmp_path, "a target of width 24, but the target's hidden_size is 48", target=wide)
    larger = dataclasses.replace(TARGET, vocab_size=V + 2)
    message = r"(of 40 tokens|'t2d' has shape \[40\]), but the target has 42"
    refused(tmp_path, message if config else r"but \[42, 24\] is expected", target=larger)


@pytest.mark.parametrize(
    ("layers", "changes", "read"),
    [
        (5, {IDS_KEY: [2, 4, 5]}, "2, 4, 5"),  # 5 would be the last layer's output, not normed
        (5, {"eagle_config": {IDS_KEY: [1, 2, 4]}}, "2, 3, 5"),
        (2, {}, "2, 1, -1"),
        (8, {IDS_KEY: [-1, 2, 4]}, "-1, 2, 4"),
    ],
)
def test_hidden_states_that_the_target_lacks(
    tmp_path: Path, layers: int, changes: Any, read: str
) -> None:
    write_head(tmp_path, files.eagle3(), EAGLE3 | changes)
    target = dataclasses.replace(TARGET, num_hidden_layers=layers)
    refused(tmp_path, f"layers {read}, but the target has layers 0 to {layers - 1}", target=target)


# What we write


CONFIG = HeadConfig("eagle3", ModelConfig(V, D, 20, 1, 4, 2, 8, 64), V, D, taps=(2, 4, 8))


def test_saved_heads_for_another_target(tmp_path: Path) -> None:
    save_head(tmp_path / "head", CONFIG, init_head(CONFIG, jax.random.key(0)))
    target = dataclasses.replace(TARGET, num_hidden_layers=7)
    refused(tmp_path / "head", "hidden states 2, 4, 8, but the target has 8", target=target)
    target = dataclasses.replace(TARGET, hidden_size=25)
    refused(tmp_path / "head", "a target of width 24", target=target)
    target = dataclasses.replace(TARGET, vocab_size=V + 1)
    refused(tmp_path / "head", "vocabulary of 40 tokens, but the target has 41", target=target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "another version of jspec"),
        ({"family": "eagle"}, "says family 'eagle', but the tensors are those of 'eagle3'"),
        ({"layers": {"hidden_size": 3}}, "invalid"),
        ({"taps": 3}, "invalid"),
        ({"unheard_of": 3}, "invalid"),
        ({"draft_vocab_size": 9}, "its tensors know 40 tokens, but its config.json 9"),
    ],
)
def test_damaged_settings_of_ours(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = tmp_path / "head"
    save_head(folder, CONFIG, init_head(CONFIG, jax.random.key(0)))
    data = json.loads((folder / "config.json").read_text())
    data["jspec"] |= change
    (folder / "config.json").write_text(json.dumps(data))
    refused(folder, message)


def test_a_head_is_saved_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = init_head(CONFIG, jax.random.key(0))
    taken = tmp_path / "taken"
    write_head(taken, files.eagle())
    with pytest.raises(JspecError, match=r"taken: exists and is not empty"):
        save_head(taken, CONFIG, params)
    with pytest.raises(JspecError, match=r"'fc' of the head has shape \[2, 2\]"):
        save_head(tmp_path / "wrong", CONFIG, params.replace(fc=jnp.ones((2, 2))))
    with pytest.raises(JspecError, match="'fc_bias' is in only one of"):
        save_head(tmp_path / "wrong", CONFIG, params.replace(fc_bias=jnp.ones(D)))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(JspecError, match=r"full: cannot be written \(No space left"):
        save_head(tmp_path / "full", CONFIG, params)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
