"""Heads read from files compute what their trainers' code computes.

The reference is numpy, over the tensors under the names that they have in the file, written from
the descriptions of the formats (FACTS, section D): EAGLE `cnets1.py` and `cnets.py`, DeepSeek-V3
and Qwen3-Next MTP, Medusa. Float64, one row, full causal attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import head_files as files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_files import IDS, NKV, D, H, L, N, V, load, settings, target_params, write_head

from jspec import heads

T = 6
EPS = 1e-5
THETA = 50.0
"""Small, so that six positions turn far."""
Tensors = dict[str, np.ndarray]

EMBED = np.asarray(target_params().embed, np.float64)
LM_HEAD = np.asarray(target_params().lm_head, np.float64)
RNG = np.random.default_rng(7)
TOKENS = RNG.integers(0, V, T)
FEATURES = RNG.standard_normal((3, T, D))


def rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * scale


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rotated(x: np.ndarray) -> np.ndarray:
    """`[T, heads, H]`, halves paired, by position 0, 1, ..."""
    angles = np.arange(T)[:, None] * THETA ** (-np.arange(0, H, 2) / H)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., : H // 2], x[..., H // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(w: Tensors, prefix: str, read: np.ndarray) -> np.ndarray:
    def project(name: str, heads: int) -> np.ndarray:
        out = read @ w[f"{prefix}self_attn.{name}_proj.weight"].T
        return out.reshape(T, heads, H)

    q, k, v = rotated(project("q", N)), rotated(project("k", NKV)), project("v", NKV)
    k, v = (np.repeat(x, N // NKV, 1) for x in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(H)
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("nts,snh->tnh", weights, v).reshape(T, N * H)
    return out @ w[f"{prefix}self_attn.o_proj.weight"].T


def layer(w: Tensors, prefix: str, read: np.ndarray, residual: np.ndarray) -> np.ndarray:
    hidden = residual + attention(w, prefix, read)
    normed = rms(hidden, w[f"{prefix}post_attention_layernorm.weight"])
    gate, up, down = (w[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
    return hidden + (silu(normed @ gate.T) * (normed @ up.T)) @ down.T


def usual_layer(w: Tensors, prefix: str, hidden: np.ndarray) -> np.ndarray:
    return layer(w, prefix, rms(hidden, w[f"{prefix}input_layernorm.weight"]), hidden)


def eagle1(w: Tensors) -> tuple[np.ndarray, np.ndarray]:
    """Next features and logits: fc over (embedding, feature), no first norm, no last norm."""
    pair = np.concatenate([EMBED[TOKENS], FEATURES[0]], -1)
    x = pair @ w["fc.weight"].T + w["fc.bias"]
    x = usual_layer(w, "layers.1.", layer(w, "layers.0.", x, x))
    return x, x @ LM_HEAD.T


def eagle3(w: Tensors, flags: dict[str, bool]) -> tuple[np.ndarray, np.ndarray]:
    """Next features and logits over the draft vocabulary."""
    features = list(FEATURES)
    if flags.get("fc_norm"):
        features = [rms(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(features)]
    joined = np.concatenate(features, -1)
    if flags.get("norm_before_fc"):
        joined = rms(joined, w["input_norm.weight"])
    fused = joined @ w["fc.weight"].T
    embedded = rms(EMBED[TOKENS], w["midlayer.input_layernorm.weight"])
    normed = rms(fused, w["midlayer.hidden_norm.weight"])
    residual = normed if flags.get("norm_before_residual") else fused
    x = layer(w, "midlayer.", np.concatenate([embedded, normed], -1), residual)
    x = usual_layer(w, "layers.1.", x)
    final = rms(x, w["norm.weight"])
    return (final if flags.get("norm_output") else x), final @ w["lm_head.weight"].T


def nextn(w: Tensors) -> tuple[np.ndarray, np.ndarray]:
    """DeepSeek-V3's MTP as vLLM runs it: no embedding at position 0, features not normed."""
    prefix = f"model.layers.{L}."
    embedded = np.where(np.arange(T)[:, None] == 0, 0, EMBED[TOKENS])
    pair = [rms(embedded, w[f"{prefix}enorm.weight"]), rms(FEATURES[0], w[f"{prefix}hnorm.weight"])]
    x = usual_layer(w, prefix, np.concatenate(pair, -1) @ w[f"{prefix}eh_proj.weight"].T)
    return x, rms(x, w[f"{prefix}shared_head.norm.weight"]) @ LM_HEAD.T


def qwen(w: Tensors) -> tuple[np.ndarray, np.ndarray]:
    """Qwen3-Next's MTP: norms stored less one, and the normed output is the next feature."""
    w = {name: x + 1 if "norm" in name else x for name, x in w.items()}
    embedded = rms(EMBED[TOKENS], w["mtp.pre_fc_norm_embedding.weight"])
    normed = rms(FEATURES[0], w["mtp.pre_fc_norm_hidden.weight"])
    x = np.concatenate([embedded, normed], -1) @ w["mtp.fc.weight"].T
    final = rms(usual_layer(w, "mtp.layers.0.", x), w["mtp.norm.weight"])
    return final, final @ LM_HEAD.T


def causal(memory: None, _layer: int, q: Any, k: Any, v: Any) -> tuple[Any, None]:
    """What `jspec.heads` calls `attend`: all of a text at once."""
    k, v = (jnp.repeat(x, N // NKV, 2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    scores = jnp.where(np.tri(T, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v), memory


def run(head: Any) -> tuple[np.ndarray, np.ndarray]:
    """What the head carries to the next draft step, and its logits."""
    config, params = head
    features = tuple(jnp.asarray(x[None], jnp.float32) for x in FEATURES)
    fused = heads.fuse(params, config, features[: len(config.taps)])
    positions = jnp.arange(T, dtype=jnp.int32)[None]
    tokens = jnp.asarray(TOKENS[None], jnp.int32)
    out, _ = heads.forward(params, config, tokens, fused, None, positions=positions, attend=causal)
    return (
        np.asarray(heads.carry(params, config, out))[0],
        np.asarray(heads.logits(params, config, out))[0],
    )


def check(head: Any, expected: tuple[np.ndarray, np.ndarray]) -> None:
    for ours, theirs in zip(run(head), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


def wide(tensors: Tensors) -> Tensors:
    return {name: x.astype(np.float64) for name, x in tensors.items() if x.dtype == np.float32}


def test_eagle(tmp_path: Path) -> None:
    tensors = files.eagle(layers=2)
    write_head(tmp_path, tensors, settings(rope_theta=THETA))
    check(load(tmp_path), eagle1(wide(tensors)))


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("norm_before_residual",),
        ("norm_before_fc", "norm_output"),
        ("fc_norm", "norm_before_residual", "norm_output"),
    ],
)
def test_eagle3(tmp_path: Path, flags: tuple[str, ...]) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    if "fc_norm" in flags:
        shapes = {f"fc_norm.{i}.weight": (D,) for i in range(3)}
    if "norm_before_fc" in flags:
        shapes = {"input_norm.weight": (3 * D,)}
    tensors = files.eagle3(layers=2) | files.numbers(shapes)
    asked = dict.fromkeys(flags, True)
    write_head(tmp_path, tensors, settings(rope_theta=THETA, **asked))
    head = load(tmp_path)
    features, logits = eagle3(wide(tensors), asked)
    check(head, (features, logits))
    scattered = heads.in_target_vocabulary(run(head)[1], head.params.token_ids, V)
    assert np.isneginf(np.delete(scattered, IDS, -1)).all()
    np.testing.assert_allclose(np.asarray(scattered)[:, IDS], logits, rtol=2e-4, atol=2e-4)


def test_nextn(tmp_path: Path) -> None:
    write_head(tmp_path, files.nextn(), settings(rope_theta=THETA))
    check(load(tmp_path), nextn(wide(files.nextn())))


def test_qwen(tmp_path: Path) -> None:
    data = settings(rope_theta=THETA, model_type="qwen3_next", partial_rotary_factor=1.0)
    write_head(tmp_path, files.qwen_mtp(), data)
    check(load(tmp_path), qwen(wide(files.qwen_mtp())))


def test_medusa(tmp_path: Path) -> None:
    tensors = files.medusa()
    write_head(tmp_path, tensors, None, "medusa_lm_head.pt")
    params: Any = load(tmp_path).params
    out = heads.medusa_logits(params, jnp.asarray(FEATURES[0], jnp.float32))
    w = wide(tensors)
    for i in range(3):
        x = FEATURES[0]
        x = x + silu(x @ w[f"{i}.0.linear.weight"].T + w[f"{i}.0.linear.bias"])
        expected = x @ w[f"{i}.1.weight"].T
        np.testing.assert_allclose(out[i], expected, rtol=2e-4, atol=2e-4)
