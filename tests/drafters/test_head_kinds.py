"""Heads whose layer has latent attention, gates or experts: what they draft, alone and in `LLM`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_head import LAYERS, PASSAGES, K, Rows, probs
from tiny import ONE_LAYER, TARGET, head_config, llama_params, trained_head

import checkpoints
import jspec
from jspec import DynamicTree, SamplingParams, heads
from jspec import cache as cache_lib
from jspec.attention import attend
from jspec.cache import CacheSpec
from jspec.config import ExpertsConfig, LatentConfig, ModelConfig, RopeScaling


def deepseek(plain: ModelConfig) -> ModelConfig:
    """`plain` with DeepSeek-V3's layer: queries and keys of 8 + 4 numbers, values of 6."""
    return dataclasses.replace(
        plain,
        num_key_value_heads=plain.num_attention_heads,
        head_dim=12,
        rope_theta=50.0,
        rope_interleave=True,
        rope_scaling=RopeScaling("yarn", 4.0, 16, mscale=1.0, mscale_all_dim=0.7),
        latent=LatentConfig(10, 8, 4, 6, q_lora_rank=9),
        experts=ExpertsConfig(
            6, 2, 16, 32, scoring_func="sigmoid", n_group=3, topk_group=2, routed_scaling_factor=1.5
        ),
    )


def qwen_next(plain: ModelConfig) -> ModelConfig:
    """`plain` with Qwen3-Next's layer."""
    return dataclasses.replace(
        plain,
        head_dim=8,
        rope_theta=50.0,
        qk_norm=True,
        partial_rotary_factor=0.5,
        gated_attention=True,
        experts=ExpertsConfig(5, 2, 16, 24, shared_expert_gate=True),
    )


KINDS = {"deepseek": deepseek, "qwen_next": qwen_next}


class Anew:
    """A head that reads all of its entries anew every time, in one pass."""

    def __init__(self, config: Any, params: Any) -> None:
        self.config, self.params = config, params

    @functools.partial(jax.jit, static_argnums=0)
    def outputs(self, params: Any, tokens: jax.Array, carried: jax.Array) -> jax.Array:
        layers, width = self.config.layers, tokens.shape[1]
        spec = CacheSpec(1, layers.num_key_value_heads, layers.head_dim)
        cache = cache_lib.init_cache(spec, 1, width, page_size=16, dtype=jnp.float32)
        cache = cache_lib.open_block(cache, width)
        positions = cache.positions(width)
        return heads.forward(
            params, self.config, tokens, carried, cache, positions=positions, attend=attend
        )[0][0]

    def drafted(self, entries: Any, tokens: list[int]) -> np.ndarray:
        """Logits behind the last of drafts `tokens` that follow `entries`."""
        read, carried = np.zeros((1, 32), np.int32), np.zeros((1, 32, 16), np.float32)
        for i, (token, (feature,)) in enumerate(entries):
            read[0, i], carried[0, i] = token, feature
        last = len(entries) - 1
        for token in tokens:
            output = self.outputs(self.params, read, carried)[last]
            last += 1
            read[0, last] = token
            carried[0, last] = heads.carry(self.params, self.config, output)
        return np.asarray(
            heads.logits(self.params, self.config, self.outputs(self.params, read, carried)[last])
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_is_that_of_a_head_that_reads_all_anew(kind: str) -> None:
    layers = KINDS[kind](LAYERS)
    feeds = {"feeds_normed": True} if kind == "qwen_next" else {"skips_first_embedding": True}
    rows = Rows(head_config("mtp", layers, draft_vocab_size=9, **feeds))
    anew, propose = Anew(rows.config, rows.params), jax.jit(rows.drafter.propose)
    for counts in PASSAGES:
        if counts is not None:
            rows.commit(counts)
            continue
        draft, _ = jax.device_get(propose(rows.params, rows.state, rows.context()))
        for row in range(3):
            for i in range(K):
                law = np.zeros(layers.vocab_size)
                logits = anew.drafted(rows.entries[row], draft.tokens[row, :i].tolist())
                law[rows.known()] = probs(logits)
                np.testing.assert_allclose(draft.probs[row, i], law, atol=2e-5)


# In the engine, from files

PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5]]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
COUPLED = SamplingParams(max_tokens=24, temperature=1.0, verification="coupled", seed=3)
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": ("{}", {"num_speculative_tokens": 3}),
    "tree": ("{}", {"tree": DynamicTree(3, 2, 7)}),
    "verifier": ("cascade(ngram, mtp:{})", {}),
}


def llm(drafter: str, **settings: Any) -> jspec.LLM:
    settings = {"dtype": "float32", "max_num_seqs": 2, "batch_sizes": (2,)} | settings
    return jspec.LLM(TARGET, params=llama_params(0), drafter=drafter, **settings)


def texts(engine: jspec.LLM) -> tuple[list[Any], int]:
    """Tokens of greedy and coupled answers, and how many drafts were accepted."""
    outputs = [o for settings in (GREEDY, COUPLED) for o in engine.generate(PROMPTS, settings)]
    return [o.token_ids for o in outputs], sum(o.metrics.num_accepted for o in outputs)


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return texts(llm("none"))[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of each kind in its own public layout."""
    root = tmp_path_factory.mktemp("heads")
    for kind, layers_of in KINDS.items():
        config, params = trained_head("mtp", 48, layers_of(ONE_LAYER))
        config = dataclasses.replace(config, skips_first_embedding=kind == "deepseek")
        checkpoints.save_head(root / kind, config, params, shares_lm_head=False)
    return root


@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, way) for kind in KINDS for way in ("chain", "tree")), ("deepseek", "verifier")],
)
def test_the_text_is_that_of_plain_decoding(
    kind: str, way: str, folders: Path, plain: list[Any]
) -> None:
    drafter, settings = WAYS[way]
    engine = llm(drafter.format(folders / kind), **settings)
    found, accepted = texts(engine)
    assert found == plain
    assert accepted > 0
