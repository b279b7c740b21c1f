"""Speculation inside a drafter: text, acceptance, levels, rows of different speed."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    CONFIG,
    counts_of,
    llama_params,
    rows_of,
    run,
    sampling,
    start,
    text_of_the_target,
    trained_head,
    uncached,
)

from jspec.check import check
from jspec.decode import DecodeConfig
from jspec.drafters.base import Context, Draft
from jspec.drafters.cascade import Cascade
from jspec.drafters.early_exit import EarlyExit
from jspec.drafters.head import HeadDrafter
from jspec.drafters.head_verifier import HeadVerifier
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.none import NoDrafter
from jspec.drafters.verifiers import ModelVerifier, exit_verifier
from jspec.errors import JspecError
from jspec.exits import own_exit
from jspec.model import llama

L = 5
DEEP = dataclasses.replace(CONFIG, num_hidden_layers=L)
TARGET = llama(DEEP)
CASES = (
    "two exits",
    "three levels",
    "n-gram below an exit",
    "n-gram below a lenient exit",
    "a model of its own",
    "its own exit below a model",
    "n-gram below a head",
    "nothing below an exit",
)
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 8], [5, 6] * 9]


@pytest.fixture(scope="module")
def head():
    return trained_head("mtp", 48)


def params(silent_from=L):
    """A random model, of which the layers from `silent_from` on add nothing."""
    whole = llama_params(0, jnp.float32, DEEP)
    layers = tuple(
        layer
        if i < silent_from
        else layer.replace(o=jnp.zeros_like(layer.o), down=jnp.zeros_like(layer.down))
        for i, layer in enumerate(whole.layers)
    )
    return whole.replace(layers=layers)


def exits(target, *layers, K=2, window=3):
    """Cascades of exits, the first drafting, and their parameters."""
    mine = (target, own_exit(target))
    drafter, drafter_params = EarlyExit(DEEP, layers[0], K), mine
    for layer in layers[1:]:
        drafter = Cascade(drafter, exit_verifier(DEEP, layer), window)
        drafter_params = (drafter_params, mine)
    return drafter, drafter_params


def decode(target, drafter, drafter_params, *, max_tokens=40, prompts=PROMPTS, **settings):
    config = DecodeConfig(TARGET, drafter, (max(drafter.num_draft_nodes + 1, 6),))
    wanted = sampling(len(prompts), **settings)
    state = start(config, prompts, max_tokens=max_tokens, settings=wanted)
    return run(config, (target, drafter_params), state)


def cases(target, head):
    small = llama_params(1)
    return {
        "two exits": exits(target, 1, 3),
        "three levels": exits(target, 1, 2, 4),
        "n-gram below an exit": (
            Cascade(NgramDrafter(3), exit_verifier(DEEP, 2), 2),
            ((), (target, own_exit(target))),
        ),
        "n-gram below a lenient exit": (
            Cascade(NgramDrafter(3), exit_verifier(DEEP, 2), 2, lenience=0.05),
            ((), (target, own_exit(target))),
        ),
        "a model of its own": (
            Cascade(NgramDrafter(3), ModelVerifier(llama(CONFIG)), 3),
            ((), small),
        ),
        "its own exit below a model": (
            Cascade(EarlyExit(CONFIG, 1, 2), ModelVerifier(llama(CONFIG)), 3),
            ((small, own_exit(small)), small),
        ),
        "n-gram below a head": (
            Cascade(NgramDrafter(3), HeadVerifier(head[0]), 3),
            ((), head[1]),
        ),
        "nothing below an exit": (
            Cascade(NoDrafter(), exit_verifier(DEEP, 2), 3),
            ((), (target, own_exit(target))),
        ),
    }


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("case", CASES)
def test_the_text_is_that_of_plain_decoding(case, temperature, head):
    target = params()
    settings = {"temperature": temperature, "coupled": True}
    plain = decode(target, NoDrafter(), (), **settings)
    state = decode(target, *cases(target, head)[case], **settings)
    assert rows_of(state) == rows_of(plain)
    assert counts_of(state).drafted.sum() > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layers", [(1, 3), (1, 2, 4)])
def test_exits_that_know_all_are_accepted_always(layers, temperature):
    """Layers that add nothing behind the first exit: every level has the target's law."""
    target = params(silent_from=1)
    state = decode(target, *exits(target, *layers), temperature=temperature)
    counts = counts_of(state)
    assert np.array_equal(counts.drafted, counts.accepted)
    assert counts.drafted[:, 2].min() > 0  # windows of three are filled


def test_what_the_inner_verifier_accepts_is_accepted_where_it_is_the_target():
    """The drafter is often wrong, the inner verifier never: all that it lets through stands."""
    target = params(silent_from=3)
    counts = counts_of(decode(target, *exits(target, 1, 3), temperature=1.0))
    assert np.array_equal(counts.drafted, counts.accepted)
    single = counts_of(decode(target, *exits(target, 1), temperature=1.0))
    assert single.accepted.sum() < single.drafted.sum()


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "coupled"])
@pytest.mark.parametrize(
    ("rows", "layers"), [(1, (2, 4)), (3, (2, 4)), (16, (2, 4)), (16, (1, 2, 4))]
)
def test_rows_fill_their_windows_at_their_own_speed(rows, layers, temperature):
    """A row's text does not depend on the others, whose windows fill sooner or later."""
    target = params()
    prompts = [[1 + r % 50, 2 + 3 * r % 41] for r in range(rows)]
    settings = {"temperature": temperature, "coupled": True, "prompts": prompts, "max_tokens": 24}
    drafter, drafter_params = exits(target, *layers)
    state = decode(target, drafter, drafter_params, **settings)
    plain = decode(target, NoDrafter(), (), **settings)
    assert rows_of(state) == rows_of(plain)
    drafted = counts_of(state).drafted
    assert drafted.shape[1] <= drafter.num_speculative_tokens  # a row with a full window is idle
    assert rows == 1 or len({tuple(row) for row in drafted.tolist()}) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("below", [NoDrafter(), NgramDrafter(2)], ids=["nothing", "n-gram"])
def test_a_head_checks_by_the_law_that_it_drafts_by(temperature, below, head):
    """Under the coupled rule its window holds the tokens that it would draft itself."""

    def text(drafter, drafter_params):
        settings = DecodeConfig(llama(CONFIG), drafter, (8,))
        wanted = sampling(3, temperature=temperature, coupled=True)
        # Text that the head was fitted to; behind a prompt of two tokens it has read nothing.
        rows = np.asarray(text_of_the_target()[0][:3])
        prompts = [row[:length].tolist() for row, length in zip(rows, (3, 5, 8), strict=True)]
        state = start(settings, prompts, max_tokens=60, settings=wanted)
        state = run(settings, (llama_params(0), drafter_params), state)
        return rows_of(state), counts_of(state).accepted

    config, params = head
    window, accepted = text(Cascade(below, HeadVerifier(config), 3), ((), params))
    own, its = text(HeadDrafter(config, 3), params)
    assert window == own
    assert its.sum() > 10
    if below.num_speculative_tokens == 0:  # windows are filled to the token
        assert np.array_equal(accepted, its)
    assert accepted.sum() >= its.sum()


def judged(drafts, counts, leaning):
    """What the target, leaning so much to drafts `[B, 2]` behind a token 7, says of them."""
    config = DecodeConfig(TARGET, NoDrafter(), (3,))
    state = start(config, [[7]] * len(drafts), max_tokens=8)
    context = Context(state.tokens, state.lengths, state.sampling, state.cache)
    draft = Draft(jnp.asarray(drafts), None, jnp.asarray(counts))
    found = check(TARGET, params(), context, draft, width=3, most=2, taps=(), leaning=leaning)
    return found.verdict.num_accepted.tolist(), found.verdict.next_token.tolist()


def test_a_lenient_verifier_lets_through_what_is_nearly_its_best():
    """Greedily a draft stands if its logit is at most so much below the best."""
    drafts = [[3, 5], [11, 2], [7, 9], [1, 1]]
    logits = np.asarray(uncached(TARGET, params(), jnp.asarray([[7, *d] for d in drafts]))[0])
    gaps = np.array([logits[b].max(-1)[:2] - logits[b, range(2), d] for b, d in enumerate(drafts)])
    for low, high in itertools.pairwise(sorted(gaps.ravel())):
        leaning = float(low + high) / 2
        stands = gaps < leaning
        assert judged(drafts, [2] * 4, leaning)[0] == stands.cumprod(1).sum(1).tolist()
    # It leans to no draft that does not count.
    accepted, behind = judged(drafts, [1] * 4, 100.0)
    assert accepted == [1] * 4
    assert behind == logits[:, 1].argmax(-1).tolist()


def test_a_lenient_cascade_drafts_what_is_below_it():
    """Almost no lenience: n-grams stand as they are, and the exit only says what comes behind."""
    target = params()
    drafter = Cascade(NgramDrafter(3), exit_verifier(DEEP, 2), 1, lenience=1e-30)
    state = decode(target, drafter, ((), (target, own_exit(target))))
    assert counts_of(state).drafted[:, 2].sum() > 0


def test_bad_cascades():
    for lenience in (0.0, 1.5):
        with pytest.raises(JspecError, match=f"lenience={lenience} must be above 0 and at most 1"):
            Cascade(NgramDrafter(3), exit_verifier(DEEP, 2), lenience=lenience)
    with pytest.raises(JspecError, match="cascade: window=0 must be at least 1"):
        Cascade(NgramDrafter(3), exit_verifier(DEEP, 2), 0)
    with pytest.raises(JspecError, match="an exit behind 5 layers: the model has 5"):
        exit_verifier(DEEP, L)
