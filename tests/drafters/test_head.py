"""Heads against a dense reference in float64 numpy, and heads that copy their target.

The reference knows entries only: no cache, no batch, no chunks, and nothing of `jspec.heads`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    CONFIG,
    counts_of,
    head_config,
    head_params,
    llama_params,
    run,
    sampling,
    start,
)

from jspec.attention import attend
from jspec.cache import CacheSpec
from jspec.config import ModelConfig
from jspec.decode import DecodeConfig
from jspec.drafters.base import Context, Passage
from jspec.drafters.growth import DynamicTree, StaticTree
from jspec.drafters.head import HeadDrafter
from jspec.layers import rms_norm
from jspec.model import Model, Output, embed, project_heads, rest_of_layer, unembed

V, WIDE, K = 13, 12, 3
LAYERS = ModelConfig(
    vocab_size=V,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)
TWO = dataclasses.replace(LAYERS, num_hidden_layers=2)
HEADS = {
    "mtp": head_config("mtp", LAYERS, draft_vocab_size=9, skips_first_embedding=True),
    "eagle": head_config("eagle", LAYERS, fc_bias=True),
    "eagle3": head_config(
        "eagle3", TWO, draft_vocab_size=9, target_hidden_size=WIDE, fc_norm=True, feeds_normed=True
    ),
    "eagle3, normed first": head_config(
        "eagle3",
        LAYERS,
        taps=(1, -1),
        target_hidden_size=WIDE,
        norm_before_fc=True,
        norm_before_residual=True,
    ),
}


class Dense:
    """A head that computes all of its entries anew every time."""

    def __init__(self, config, params):
        self.config = config
        self.params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(self, x, scale):
        eps = self.config.layers.rms_norm_eps
        return x if scale is None else x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale

    def fuse(self, features):
        """What an entry reads of the features `[D]` at its slot."""
        if self.config.family != "eagle3":
            return features[0]
        norms = self.params.fc_norms
        if self.config.fc_norm:
            features = [self.norm(x, scale) for x, scale in zip(features, norms, strict=True)]
        joined = np.concatenate(features)
        if self.config.norm_before_fc:
            joined = self.norm(joined, norms[0])
        return self.params.fc @ joined

    def outputs(self, tokens, carried):
        """Of entries 0, 1, ... with these tokens and carried vectors."""
        p, config = self.params, self.config
        carried = np.stack(carried)
        embedded = p.embed[tokens]
        if config.skips_first_embedding:
            embedded[0] = 0
        normed = self.norm(carried, p.feature_norm)
        pair = np.concatenate([self.norm(embedded, p.embed_norm), normed], axis=1)
        if config.family == "eagle3":
            read, residual = pair, normed if config.norm_before_residual else carried
        else:
            residual = pair @ p.fc.T + (0 if p.fc_bias is None else p.fc_bias)
            read = self.norm(residual, p.layers[0].input_norm)
        for i, layer in enumerate(p.layers):
            if i:
                read = self.norm(residual, layer.input_norm)
            residual = residual + self.attended(layer, read)
            normed = self.norm(residual, layer.post_norm)
            gate = normed @ layer.gate.T
            residual = (
                residual + (gate / (1 + np.exp(-gate)) * (normed @ layer.up.T)) @ layer.down.T
            )
        return residual

    def attended(self, layer, read):
        """Causal attention over the entries, whose positions are their numbers."""
        H, n = self.config.layers.head_dim, len(read)
        angles = np.arange(n)[:, None] * self.config.layers.rope_theta ** -(np.arange(0, H, 2) / H)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

        def rotated(weight):
            a, b = np.split(np.einsum("td,nhd->tnh", read, weight), 2, axis=-1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        queries, values = rotated(layer.q), np.einsum("td,nhd->tnh", read, layer.v)
        group = layer.q.shape[0] // layer.k.shape[0]
        keys, values = (np.repeat(x, group, axis=1) for x in (rotated(layer.k), values))
        scores = np.einsum("tnh,snh->nts", queries, keys) / np.sqrt(H)
        weights = np.exp(scores) * np.tri(n)
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("nts,snh,dnh->td", weights, values, layer.o)

    def drafted(self, entries, tokens):
        """Logits `[draft V]` behind the last of drafts `tokens` that follow true entries
        `[(token, features), ...]`; each draft's entry carries the output of the one before."""
        read = [token for token, _ in entries]
        carried = [self.fuse(features) for _, features in entries]
        output = self.outputs(read, carried)[-1]
        for token in tokens:
            fed = self.norm(output, self.params.final_norm) if self.config.feeds_normed else output
            read, carried = [*read, token], [*carried, fed]
            output = self.outputs(read, carried)[-1]
        return self.params.lm_head @ self.norm(output, self.params.final_norm)


class Rows:
    """Rows of a head drafter and, beside them, the entries that they should hold."""

    def __init__(self, config):
        params = head_params(config, 7)
        if not config.has_norms:  # logits of the size that others have
            params = params.replace(lm_head=params.lm_head / 20)
        self.config, self.params = config, params
        self.drafter = HeadDrafter(config, K)
        self.state = self.drafter.init(3, 32, jnp.float32)
        self.entries = [[], [], []]
        self.rng = np.random.default_rng(1)
        self.take_in = jax.jit(self.drafter.commit)

    def commit(self, counts):
        """A passage of K + 1 places, of which `counts` are entries."""
        tokens = self.rng.integers(V, size=(3, K + 1)).astype(np.int32)
        shape = (3, K + 1, self.config.target_hidden_size)
        features = [self.rng.normal(size=shape).astype(np.float32) for _ in self.config.taps]
        passage = Passage(tokens, tuple(features), np.array(counts, np.int32))
        for row, count in enumerate(counts):
            new = [(tokens[row, i].item(), [x[row, i] for x in features]) for i in range(count)]
            self.entries[row] += new
        self.state = self.take_in(self.params, self.state, self.context(), passage)

    def context(self):
        lengths = jnp.array([len(row) + 1 for row in self.entries], jnp.int32)
        settings = sampling(3, vocab_size=V, temperature=1.0)
        return Context(jnp.zeros((3, 32), jnp.int32), lengths, settings)

    def known(self):
        """The target's ids of the head's tokens."""
        ids = self.params.token_ids
        return np.arange(V) if ids is None else np.asarray(ids)


def probs(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


# Passages with all, some and no entries of a row; a draft after the third and the fifth.
PASSAGES = ([4, 2, 1], [2, 0, 0], [1, 4, 0], None, [4, 1, 2], [0, 3, 1], None)


@pytest.mark.parametrize("name", HEADS)
def test_a_chain_goes_on_from_true_entries_with_the_heads_own_outputs(name):
    rows = Rows(HEADS[name])
    dense = Dense(rows.config, rows.params)
    propose = jax.jit(rows.drafter.propose)
    for counts in PASSAGES:
        if counts is not None:
            rows.commit(counts)
            continue
        draft, _ = jax.device_get(propose(rows.params, rows.state, rows.context()))
        assert draft.num_drafted.tolist() == [K] * 3
        for row in range(3):
            for i in range(K):
                law = np.zeros(V)
                logits = dense.drafted(rows.entries[row], draft.tokens[row, :i].tolist())
                law[rows.known()] = probs(logits)
                np.testing.assert_allclose(draft.probs[row, i], law, atol=2e-5)


@dataclasses.dataclass(frozen=True, eq=False)
class Spy:
    """A tree shape that notes what is read, and what comes of it."""

    shape: object
    reads: list

    def __getattr__(self, name):
        return getattr(self.shape, name)

    def grow(self, logits, memory, expand):
        def watched(memory, tokens, parents):
            scored, memory = expand(memory, tokens, parents)
            self.reads.append((tokens, parents, scored))
            return scored, memory

        draft, memory = self.shape.grow(logits, memory, watched)
        self.reads.append(draft.tokens)
        return draft, memory


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mtp", DynamicTree(K, 2, 6)),
        ("eagle", StaticTree(((0,), (1,), (2,), (0, 0), (2, 1), (2, 2), (2, 1, 0), (0, 0, 3)))),
        ("eagle3", DynamicTree(K, 3, 9)),
    ],
)
def test_a_tree_reads_each_node_as_the_chain_on_the_way_to_it(name, shape):
    rows = Rows(HEADS[name])
    dense = Dense(rows.config, rows.params)

    def propose(params, state, context):
        spy = Spy(shape, [])
        drafter = HeadDrafter(rows.config, K, spy)
        draft, _ = drafter.propose(params, state, context)
        return draft.tokens, spy.reads

    propose, known = jax.jit(propose), rows.known()
    for counts in PASSAGES:
        if counts is not None:
            rows.commit(counts)
            continue
        tokens, (*reads, kept) = jax.device_get(propose(rows.params, rows.state, rows.context()))
        np.testing.assert_array_equal(tokens, known[kept])
        for row in range(3):
            paths = []
            for read, parents, scored in reads:
                for token, parent, logits in zip(read[row], parents[row], scored[row], strict=True):
                    above = [] if parent < 0 else paths[parent]
                    paths.append([*above, known[token].item()])
                    expected = dense.drafted(rows.entries[row], paths[-1])
                    np.testing.assert_allclose(logits, expected, atol=1e-4)
            assert len(paths) == shape.num_read


def blind(params, tokens, cache, *, config, bare):
    """A layer whose attention does not see slot 0, as no entry of a head stands for it: a
    constant beside each query finds -1e4 beside the key of slot 0. If `bare`, the layer's input
    is not added to its output."""
    layer, H = params.layers[0], config.head_dim
    embedded, positions = embed(params, tokens), cache.positions(tokens.shape[1])
    read = rms_norm(embedded, layer.input_norm, config.rms_norm_eps)
    queries, keys, values, _ = project_heads(layer, config, read, positions)
    hides = jnp.where(positions == 0, -1e4, 0.0)[..., None, None]
    beside = [
        jnp.broadcast_to(x, (*heads.shape[:3], H))
        for x, heads in ((1.0, queries), (hides, keys), (0.0, values))
    ]
    queries, keys, values = (
        jnp.concatenate(x, axis=-1)
        for x in zip((queries * 2**0.5, keys, values), beside, strict=True)
    )
    attended, cache = attend(cache, 0, queries, keys, values)
    residual = jnp.zeros_like(embedded) if bare else embedded
    hidden = rest_of_layer(layer, config, residual, attended[..., :H])
    final = rms_norm(hidden, params.final_norm, config.rms_norm_eps)
    return Output(unembed(params, final), (embedded, hidden, final), cache)


ONE = dataclasses.replace(CONFIG, num_hidden_layers=1)


def copied(family, tree=None):
    """A target and a head that computes in entry s what the target does in slot s + 1: features
    are ignored, tokens read as the target reads them."""
    params = llama_params(4, config=ONE)
    # Scaled so that greedy decoding is sure of itself; of mean square one, so that norms keep it.
    rms = jnp.sqrt(jnp.mean(params.embed**2, axis=1, keepdims=True))
    params = params.replace(embed=params.embed / rms, lm_head=params.lm_head * 20)
    layer, D = params.layers[0], ONE.hidden_size
    if family == "eagle":
        layer = layer.replace(input_norm=None)
        params = params.replace(layers=(layer,), final_norm=None)
    config = head_config(family, ONE, norm_before_residual=family == "eagle3")
    keeps = jnp.full((D,), (1 + ONE.rms_norm_eps) ** 0.5)
    head = head_params(config, 0).replace(
        embed=params.embed, lm_head=params.lm_head, final_norm=params.final_norm
    )
    if family == "eagle3":  # what is carried is multiplied by zero
        wide = {
            name: jnp.concatenate([getattr(layer, name)] * 2, axis=-1) for name in ("q", "k", "v")
        }
        head = head.replace(
            layers=(layer.replace(input_norm=None, **wide),),
            embed_norm=layer.input_norm,
            feature_norm=jnp.zeros((D,)),
        )
    else:
        head = head.replace(
            layers=(layer,),
            fc=jnp.concatenate([jnp.eye(D), jnp.zeros((D, D))], axis=1),
            embed_norm=None if family == "eagle" else keeps,
        )
    model = Model(
        functools.partial(blind, config=ONE, bare=family == "eagle3"),
        ONE.vocab_size,
        512,
        CacheSpec(1, ONE.num_key_value_heads, 2 * ONE.head_dim),
    )
    return model, params, HeadDrafter(config, 4, tree), head


LONG = [5, 9, 60, 2, 5, 5, 31, 8, 44, 17, 3, 3, 12, 20, 7, 1, 59, 33, 26, 40]
COPY_PROMPTS = [[6], [11, 4], LONG, LONG[3:16]]
COPY_TOKENS = [23, 35, 40, 26]


def assert_always_accepted(state, max_tokens, prompts):
    """Every round takes all of its draft, also the one after a full round. Before a prompt of one
    token has been read there is no entry to draft from."""
    rounds, accepted = np.asarray(state.log.rounds), np.asarray(state.log.accepted)
    for row, (n, prompt) in enumerate(zip(max_tokens, prompts, strict=True)):
        blind_rounds = int(len(prompt) == 1)
        assert accepted[row, blind_rounds : rounds[row]].tolist() == [4] * (
            rounds[row] - blind_rounds
        )
        left = n - blind_rounds * (1 + accepted[row, 0])
        assert rounds[row] == blind_rounds + -(-left // 5)


@pytest.mark.parametrize("family", ["mtp", "eagle", "eagle3"])
def test_a_head_that_copies_its_target_is_always_fully_accepted(family):
    """Greedy, rejection and coupled rows side by side, for prompts up to three chunks."""
    model, params, drafter, head = copied(family)
    config = DecodeConfig(model, drafter, (5,), prefill_chunk=8)
    prompts, max_tokens = COPY_PROMPTS * 3, COPY_TOKENS * 3
    rules = np.repeat([0, 1, 2], 4)
    settings = sampling(12, temperature=(rules > 0) * 1.0, coupled=rules == 2)
    state = run(
        config, (params, head), start(config, prompts, max_tokens=max_tokens, settings=settings)
    )
    assert_always_accepted(state, max_tokens, prompts)
    texts = np.asarray(state.tokens)
    assert len(set(texts[1, 2:37].tolist())) > 3, "the text says nothing"


@pytest.mark.parametrize("family", ["mtp", "eagle"])
def test_a_tree_of_a_head_that_copies_its_target_is_accepted_to_its_depth(family):
    model, params, drafter, head = copied(family, DynamicTree(4, 2, 12))
    config = DecodeConfig(model, drafter, (13,), prefill_chunk=8)
    state = start(config, COPY_PROMPTS, max_tokens=COPY_TOKENS)
    state = run(config, (params, head), state)
    assert_always_accepted(state, COPY_TOKENS, COPY_PROMPTS)
    assert counts_of(state).drafted.tolist() == [[r] * 4 for r in state.log.rounds.tolist()]


def test_a_trees_depth_is_the_number_of_speculative_tokens():
    with pytest.raises(ValueError, match="num_speculative_tokens=4 is not the depth 3"):
        HeadDrafter(HEADS["mtp"], 4, DynamicTree(3, 2, 6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"taps": (0, -1)}, "one feature"), ({"target_hidden_size": WIDE}, "hidden_size")],
)
def test_only_eagle3_fuses_features(changes, message):
    with pytest.raises(ValueError, match=message):
        head_config("mtp", LAYERS, **changes)
