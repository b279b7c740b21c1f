"""MTP heads whose layer is not a Llama's: DeepSeek-V3's latent attention and experts, GLM's
experts, Qwen3-Next's gates and experts; in the layouts of others, and back."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import head_files as files
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden.load import LayerCase, layer_cases
from golden.weights import golden_weights
from head_files import DEEPSEEK, QWEN_NEXT, TARGET, D, H, L, N, assert_same, leaves_of, load
from head_files import write_head as write
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import load_file

from checkpoints import LoadedHead, is_head, save_head
from jspec import cache as cache_lib
from jspec import heads
from jspec.attention import attend
from jspec.cache import Cache, CacheSpec
from jspec.config import ExpertsConfig, LatentConfig, RopeScaling
from jspec.errors import JspecError
from jspec.head_params import HeadConfig
from jspec.model import decoder_layer
from jspec.params import LayerParams

GLM = {key: x for key, x in DEEPSEEK.items() if key not in (*files.LATENT, "scoring_func")} | {
    "model_type": "glm4_moe",
    "head_dim": H,
    "num_key_value_heads": files.NKV,
    "topk_method": None,
}
KINDS = {
    "deepseek": (files.deepseek(), DEEPSEEK),
    "deepseek, wide queries": (
        files.deepseek(narrow_queries=False),
        DEEPSEEK | {"q_lora_rank": None},
    ),
    "glm": (files.glm(), GLM),
    "qwen": (files.qwen_next(), QWEN_NEXT),
}
NEXTN, MLP = f"model.layers.{L}.", f"model.layers.{L}.mlp."
ROUTED = ExpertsConfig(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=6,
    shared_expert_intermediate_size=12,
    scoring_func="sigmoid",
    n_group=2,
    topk_group=1,
    routed_scaling_factor=2.5,
)


# Read


def test_deepseek(tmp_path: Path) -> None:
    tensors = files.deepseek()
    assert is_head(write(tmp_path, tensors, DEEPSEEK))
    config, params = load(tmp_path)
    layers = config.layers
    assert layers.experts == ROUTED
    assert layers.latent == LatentConfig(12, 6, 4, 5, q_lora_rank=10)
    assert (layers.head_dim, layers.num_key_value_heads, layers.rotary_dim) == (10, N, 4)
    assert (layers.rope_interleave, layers.gated_attention) == (True, False)
    assert (config.family, config.skips_first_embedding) == ("mtp", True)
    (layer,) = params.layers
    assert (layer.q, layer.k, layer.v, layer.gate, layer.up, layer.down) == (None,) * 6
    attention = f"{NEXTN}self_attn."
    for field, name, shape in (
        ("q_a", "q_a_proj", (10, D)),
        ("q_a_norm", "q_a_layernorm", (10,)),
        ("q_b", "q_b_proj", (N, 10, 10)),
        ("kv_a", "kv_a_proj_with_mqa", (16, D)),
        ("kv_a_norm", "kv_a_layernorm", (12,)),
        ("kv_b", "kv_b_proj", (N, 11, 12)),
    ):
        expected = tensors[f"{attention}{name}.weight"].reshape(shape)
        np.testing.assert_array_equal(getattr(layer.latent, field), expected)
    np.testing.assert_array_equal(layer.o, tensors[f"{attention}o_proj.weight"].reshape(D, N, 5))
    for field in ("gate", "up", "down"):
        each = [tensors[f"{MLP}experts.{i}.{field}_proj.weight"] for i in range(4)]
        np.testing.assert_array_equal(getattr(layer.experts, field), each)
        shared = tensors[f"{MLP}shared_experts.{field}_proj.weight"]
        np.testing.assert_array_equal(getattr(layer.experts.shared, field), shared)
    np.testing.assert_array_equal(layer.experts.router, tensors[f"{MLP}gate.weight"])


def test_queries_may_come_of_the_input_itself(tmp_path: Path) -> None:
    tensors, config = KINDS["deepseek, wide queries"]
    head = load(write(tmp_path, tensors, config))
    (layer,) = head.params.layers
    assert head.config.layers.latent.q_lora_rank is None
    assert layer.latent.q_a is None
    wanted = tensors[f"{NEXTN}self_attn.q_proj.weight"].reshape(N, 10, D)
    np.testing.assert_array_equal(layer.q, wanted)


def test_latent_attention_with_a_dense_mlp(tmp_path: Path) -> None:
    """Though the config speaks of experts: the tensors tell."""
    dense = {name: x for name, x in files.nextn().items() if ".self_attn." not in name}
    tensors = dense | files.numbers(files.latent(f"{NEXTN}self_attn."))
    config, params = load(write(tmp_path, tensors, DEEPSEEK))
    assert config.layers.experts is None
    assert params.layers[0].experts is None
    np.testing.assert_array_equal(params.layers[0].gate, tensors[f"{MLP}gate_proj.weight"])


def test_glm(tmp_path: Path) -> None:
    """Which says nothing of how it scores, and of which half of a head turns."""
    config, params = load(write(tmp_path, files.glm(), GLM))
    assert config.layers.experts == ROUTED
    assert config.layers.latent is None
    assert (config.layers.rotary_dim, config.layers.rope_interleave) == (H // 2, False)
    assert params.layers[0].q.shape == (N, H, D)


def test_qwen(tmp_path: Path) -> None:
    """Alone, or within a model of pictures, whose text's settings are nested; and with
    speculators' names."""
    tensors = files.qwen_next()
    head = load(write(tmp_path / "alone", tensors, QWEN_NEXT))
    layers, (layer,) = head.config.layers, head.params.layers
    assert layers.experts == ExpertsConfig(3, 2, 6, 7, shared_expert_gate=True)
    assert (layers.gated_attention, layers.qk_norm, layers.rotary_dim) == (True, True, H // 2)
    assert layer.q.shape == (N, 2 * H, D)
    switch = tensors["mtp.layers.0.mlp.shared_expert_gate.weight"]
    np.testing.assert_array_equal(layer.experts.shared.switch, switch)
    q_norm = tensors["mtp.layers.0.self_attn.q_norm.weight"]
    np.testing.assert_array_equal(layer.q_norm, q_norm + np.float32(1))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    text = {**QWEN_NEXT, "model_type": "qwen3_5_moe_text", "rope_parameters": rope}
    del text["partial_rotary_factor"], text["intermediate_size"]
    nested = {"model_type": "qwen3_5_moe", "text_config": text}
    pictures = load(write(tmp_path / "pictures", tensors, nested))
    layers = dataclasses.replace(layers, intermediate_size=6)  # which no layer has
    config = dataclasses.replace(head.config, layers=layers)
    assert_same(pictures, LoadedHead(config, head.params))
    theirs = files.in_speculators_names(tensors)
    assert_same(load(write(tmp_path / "theirs", theirs, QWEN_NEXT)), head)


def test_a_quarter_of_a_head_turns_where_qwens_config_is_silent(tmp_path: Path) -> None:
    silent = {key: x for key, x in QWEN_NEXT.items() if key != "partial_rotary_factor"}
    config, _ = load(write(tmp_path, files.qwen_next(), silent))
    assert config.layers.partial_rotary_factor == 0.25


def test_nextn_has_whatever_number(tmp_path: Path) -> None:
    one = load(write(tmp_path / "0", files.deepseek(0), DEEPSEEK))
    assert_same(load(write(tmp_path / "61", files.deepseek(61), DEEPSEEK)), one)


def test_the_bias_that_chooses_stays_in_float32(tmp_path: Path) -> None:
    """In fewer bits it would choose other experts."""
    _, params = load(write(tmp_path, files.deepseek(), DEEPSEEK), dtype="bfloat16")
    bias = params.layers[0].experts.correction_bias
    assert bias.dtype == jnp.float32
    np.testing.assert_array_equal(bias, files.deepseek()[f"{MLP}gate.e_score_correction_bias"])
    assert params.layers[0].experts.router.dtype == jnp.bfloat16


def test_eight_bit_experts(tmp_path: Path) -> None:
    tensors = files.deepseek()
    name = f"{MLP}experts.2.up_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    data = DEEPSEEK | {"quantization_config": {"quant_method": "fp8"}}
    scale = np.full((1, 1), 0.5, np.float32)
    files.save_float8(write(tmp_path, {}, data), tensors | {f"{name}_scale_inv": scale})
    up = load(tmp_path).params.layers[0].experts.up
    np.testing.assert_array_equal(up[2], tensors[name].astype(np.float32) * 0.5)


def test_experts_are_split_as_an_mlp_is(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    write(tmp_path, files.deepseek(), DEEPSEEK)
    on_mesh, here = load(tmp_path, mesh=mesh).params, load(tmp_path).params
    (layer,) = on_mesh.layers
    assert layer.experts.gate.sharding.spec == PartitionSpec(None, "model", None)
    assert layer.experts.down.sharding.spec == PartitionSpec(None, None, "model")
    assert layer.latent.kv_b.sharding.spec == PartitionSpec("model", None, None)
    for name, array in leaves_of(here).items():
        np.testing.assert_array_equal(array, leaves_of(on_mesh)[name])


# Computed


GOLDEN = {case.name: case for case in layer_cases()}


@pytest.mark.parametrize("name", GOLDEN)
def test_layers_equal_transformers(tmp_path: Path, name: str) -> None:
    """Through a head's files: settings, names, shapes, rope, router, experts."""
    case = GOLDEN[name]
    width, mtp = case.config["hidden_size"], name.startswith("qwen")
    around, prefix = (files.qwen_mtp(), "mtp.layers.0.") if mtp else (files.nextn(), NEXTN)
    shapes = {n: tuple(width * s // D for s in x.shape) for n, x in around.items()}
    own = {n: s for n, s in shapes.items() if not re.search(r"self_attn|mlp\.|layernorm", n)}
    layer = {prefix + n: x for n, x in golden_weights(case.names_and_shapes).items()}
    write(tmp_path, files.numbers(own) | layer, case.config)
    target = dataclasses.replace(TARGET, vocab_size=64, hidden_size=width)
    params = files.target_params()
    params = params.replace(embed=jnp.zeros((64, width)), lm_head=jnp.zeros((64, width)))
    config, head = load(tmp_path, target=target, params=params)
    spec = CacheSpec(1, config.layers.num_key_value_heads, config.layers.head_dim)
    T = len(case.input)
    cache = cache_lib.init_cache(spec, 1, T, page_size=8, dtype=jnp.float32)
    cache = cache_lib.open_block(cache, T)

    @jax.jit
    def run(layer: LayerParams, hidden: jax.Array) -> jax.Array:
        return decoder_layer(layer, config.layers, hidden, cache, 0)[0][0]

    got = run(head.layers[0], jnp.asarray(case.input[None]))
    np.testing.assert_allclose(got, case.output, rtol=1e-4, atol=1e-4)
    got = through_a_head(
        head, dataclasses.replace(config, skips_first_embedding=False), case, cache
    )
    np.testing.assert_allclose(got, case.output, rtol=1e-4, atol=1e-4)


def through_a_head(params: Any, config: HeadConfig, case: LayerCase, cache: Cache) -> jax.Array:
    """The layer's output in a head that hands the case's input to it: as the sum of embedding and
    feature, both of mean square one, which their norms leave alone."""
    (T, width), rng = case.input.shape, np.random.default_rng(0)
    half = case.input / 2
    aside = rng.standard_normal(half.shape)
    aside -= half * np.sum(aside * half, 1, keepdims=True) / np.sum(half**2, 1, keepdims=True)
    length = np.sqrt(width - np.sum(half**2, 1, keepdims=True))
    aside *= length / np.linalg.norm(aside, axis=1, keepdims=True)
    keeps = jnp.full((width,), (1 + config.layers.rms_norm_eps) ** 0.5)
    head = params.replace(
        embed=jnp.asarray(half + aside, jnp.float32),
        fc=jnp.tile(jnp.eye(width), 2),
        embed_norm=keeps,
        feature_norm=keeps,
    )

    @jax.jit
    def run(head: Any, tokens: jax.Array, carried: jax.Array) -> jax.Array:
        where = cache.positions(T)
        return heads.forward(head, config, tokens, carried, cache, positions=where, attend=attend)[
            0
        ][0]

    return run(head, jnp.arange(T)[None], jnp.asarray((half - aside)[None], jnp.float32))


def test_yarn_of_deepseek(tmp_path: Path) -> None:
    """As DeepSeek-V3's config.json has it."""
    scaling = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    data = DEEPSEEK | {"rope_scaling": scaling, "max_position_embeddings": 163840}
    config, _ = load(write(tmp_path, files.deepseek(), data))
    wanted = RopeScaling("yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert config.layers.rope_scaling == wanted


# Written


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_saved_is_loaded(tmp_path: Path, name: str, dtype: str) -> None:
    tensors, data = KINDS[name]
    params = files.target_params(dtype)
    head = load(write(tmp_path / "theirs", tensors, data), dtype=dtype, params=params)
    save_head(tmp_path / "ours", *head)
    assert is_head(tmp_path / "ours")
    assert_same(load(tmp_path / "ours", dtype=dtype, params=params), head)


@pytest.mark.parametrize("name", KINDS)
def test_files_come_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Under the same names, a NextN layer's with the number 0; Qwen's norms as they multiply."""
    tensors, data = KINDS[name]
    save_head(tmp_path / "ours", *load(write(tmp_path / "theirs", tensors, data)))
    written = load_file(tmp_path / "ours" / "model.safetensors")
    wanted = {n.replace(NEXTN, "model.layers.0."): x for n, x in tensors.items()}
    if name == "qwen":
        wanted = {n: x + np.float32("norm" in n) for n, x in wanted.items()}
    assert written.keys() == wanted.keys()
    for tensor, array in wanted.items():
        np.testing.assert_array_equal(written[tensor], array, err_msg=tensor)


@pytest.mark.parametrize("name", KINDS)
def test_our_own_key_adds_nothing_to_what_others_read(tmp_path: Path, name: str) -> None:
    tensors, data = KINDS[name]
    head = load(write(tmp_path / "theirs", tensors, data))
    save_head(tmp_path / "ours", *head)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    del written["jspec"]
    (tmp_path / "ours" / "config.json").write_text(json.dumps(written))
    assert_same(load(tmp_path / "ours"), head)


def test_settings_that_others_read(tmp_path: Path) -> None:
    def written(name: str) -> Mapping[str, Any]:
        tensors, data = KINDS[name]
        save_head(tmp_path / f"{name}, ours", *load(write(tmp_path / name, tensors, data)))
        return json.loads((tmp_path / f"{name}, ours" / "config.json").read_text())

    deepseek = written("deepseek")
    unsaid = ("architectures", "bos_token_id", "eos_token_id", "torch_dtype")
    said = {key: x for key, x in DEEPSEEK.items() if key not in unsaid}
    said["max_position_embeddings"] = TARGET.max_position_embeddings
    assert {key: deepseek[key] for key in said} == said
    assert deepseek["architectures"] == ["DeepseekV3ForCausalLMNextN"]
    assert deepseek["num_nextn_predict_layers"] == 1
    assert written("deepseek, wide queries")["q_lora_rank"] is None
    assert written("glm")["model_type"] == "glm4_moe"
    qwen = written("qwen")
    assert qwen["attn_output_gate"]
    assert (qwen["num_experts"], qwen["shared_expert_intermediate_size"]) == (3, 7)
    assert qwen["partial_rotary_factor"] == 0.5


def test_heads_saved_before_there_were_other_layers(tmp_path: Path) -> None:
    """Their config.json has no such keys."""
    head = load(write(tmp_path / "theirs", files.qwen_mtp(), files.settings()))
    save_head(tmp_path / "ours", *head)
    file = tmp_path / "ours" / "config.json"
    data = json.loads(file.read_text())
    new = ("partial_rotary_factor", "rope_interleave", "gated_attention", "latent", "experts")
    for key in new:
        del data["jspec"]["layers"][key]
    file.write_text(json.dumps(data))
    assert_same(load(tmp_path / "ours"), head)


# Refused


def refused(path: Path, message: str) -> None:
    with pytest.raises(JspecError, match=message) as caught:
        load(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(path))


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp.experts.1.up_proj.weight": None}, r"lacks .*experts\.1\.up_proj\.weight'; fetch"),
        ({"mlp.gate.weight": None}, r"lacks the tensor '.*mlp\.gate\.weight'"),
        ({"mlp.gate.weight": ones(5, D)}, r"gate\.weight' has shape \[5, 24\], but \[4, 24\]"),
        ({"mlp.gate.e_score_correction_bias": None}, "lacks .*e_score_correction_bias'"),
        ({"mlp.gate.e_score_correction_bias": ones(3)}, r"bias' has shape \[3\], but \[4\]"),
        ({"mlp.experts.3.down_proj.weight": ones(D, 7)}, r"shape \[24, 7\], but \[24, 6\]"),
        ({"mlp.experts.4.down_proj.weight": ones(D, 6)}, r"unexpected .*experts\.4\.down"),
        ({"mlp.experts.03.down_proj.weight": ones(D, 6)}, r"unexpected .*experts\.03\.down"),
        ({"mlp.experts.gate_up_proj": ones(4, 12, D)}, r"unexpected .*gate_up_proj'"),
        ({"mlp.shared_experts.up_proj.weight": None}, r"lacks .*shared_experts\.up_proj"),
        ({"self_attn.kv_b_proj.weight": ones(40, 12)}, r"\[40, 12\], but \[44, 12\]"),
        ({"self_attn.kv_a_proj_with_mqa.weight": ones(12, D)}, r"but \[16, 24\]"),
        ({"self_attn.q_a_layernorm.weight": None}, "lacks .*q_a_layernorm"),
        ({"self_attn.o_proj.weight": ones(D, 32)}, r"\[24, 32\], but \[24, 20\]"),
        ({"self_attn.q_a_proj.bias": ones(10)}, r"unexpected .*q_a_proj\.bias'"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, changes: Any, message: str) -> None:
    changed = files.deepseek() | {NEXTN + name: x for name, x in changes.items()}
    write(tmp_path, {name: x for name, x in changed.items() if x is not None}, DEEPSEEK)
    refused(tmp_path, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_routed_experts": None}, "lacks 'n_routed_experts', but the tensors are those of exp"),
        ({"moe_intermediate_size": None}, "lacks 'moe_intermediate_size', but"),
        ({"num_experts_per_tok": None}, "lacks 'num_experts_per_tok', but"),
        ({"kv_lora_rank": None}, "lacks 'kv_lora_rank', but the tensors are those of latent att"),
        ({"n_routed_experts": 6}, r"gate\.weight' has shape \[4, 24\], but \[6, 24\]"),
        ({"topk_method": "group_limited_greedy"}, "topk_method 'group_limited_greedy' is not"),
        ({"scoring_func": "tanh"}, "scoring_func='tanh' must be softmax or sigmoid"),
        ({"n_group": 3}, "of self.n_group=3 of self.num_experts=4"),
        ({"num_experts_per_tok": 3}, "num_experts_per_tok=3 of 2 within reach"),
        ({"v_head_dim": 11}, "v_head_dim=11 is above the 10 numbers of a key"),
        ({"qk_rope_head_dim": 3, "qk_nope_head_dim": 7}, "rotary_dim=3 of self.head_dim=10"),
        ({"q_lora_rank": 9}, r"\[10, 24\], but \[9, 24\]"),
        ({"q_lora_rank": None}, r"unexpected tensor '.*q_a_"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, changes: Any, message: str) -> None:
    write(tmp_path, files.deepseek(), DEEPSEEK | changes)
    refused(tmp_path, message)


def test_qwens_experts_without_their_settings(tmp_path: Path) -> None:
    silent = {key: x for key, x in QWEN_NEXT.items() if key != "num_experts"}
    write(tmp_path, files.qwen_next(), silent)
    refused(tmp_path, "lacks 'num_experts', but the tensors are those of experts")


def test_a_damaged_config_of_ours(tmp_path: Path) -> None:
    head = load(write(tmp_path / "theirs", files.deepseek(), DEEPSEEK))
    save_head(tmp_path / "ours", *head)
    file = tmp_path / "ours" / "config.json"
    data = json.loads(file.read_text())
    data["jspec"]["layers"]["experts"]["n_group"] = 3
    file.write_text(json.dumps(data))
    refused(tmp_path / "ours", "invalid .*n_group=3")
    assert isinstance(head.config, HeadConfig)


def test_a_layer_that_no_layout_has(tmp_path: Path) -> None:
    """Latent attention in a head that reads the first embedding, as Qwen's MTP does."""
    config, params = load(write(tmp_path / "theirs", files.deepseek(), DEEPSEEK))
    config = dataclasses.replace(config, skips_first_embedding=False)
    with pytest.raises(JspecError, match=r"latent\.kv_a': the layout mtp has no name for it"):
        save_head(tmp_path / "ours", config, params)
    assert not (tmp_path / "ours").exists()
