"""Plans of self-speculation: replayed rounds by hand, choice, and what is measured for them."""

import dataclasses

import numpy as np
import pytest
from tiny import CONFIG, counts_of, llama_params, run, start

from jspec.calibrate import measure_costs, see
from jspec.decode import DecodeConfig
from jspec.drafters.cascade import Cascade
from jspec.drafters.early_exit import EarlyExit
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.none import NoDrafter
from jspec.drafters.verifiers import exit_verifier
from jspec.errors import JspecError
from jspec.exits import own_exit
from jspec.model import llama
from jspec.plans import Costs, Plan, Sight, agreement, candidates, ranked, replay

BEST = np.array([1, 2, 3, 4, 5, 6])
SIGHT = Sight(
    best=BEST,
    said={
        1: np.array([1, 9, 3, 9, 5, 9]),  # every other token
        2: np.array([1, 2, 3, 9, 5, 6]),
    },
    ngrams=[[1, 2], [], [], [4, 5, 6], [], []],
    gaps={
        1: [{1: 0.0}, {9: 0.0, 2: 1.0}, {3: 0.0}, {9: 0.0, 4: 3.0}, {5: 0.0}, {9: 0.0, 6: 1.0}],
        2: [{1: 0.0}, {2: 0.0}, {3: 0.0}, {9: 0.0, 4: 0.5}, {5: 0.0}, {6: 0.0}],
    },
)
COSTS = Costs(
    widths=(1, 9), layer=(1.0, 1.8), head=(2.0, 2.8), exit=(0.5, 1.3), ngrams=0.25, num_layers=4
)


def test_costs_between_widths():
    assert COSTS.at("layer", 5) == pytest.approx(1.4)
    assert COSTS.plain() == 6.0


def test_a_single_exit_by_hand():
    """Drafts two a round: (1 9) one right, then 2 is the target's; (3 9), (5 9) alike."""
    found = replay(Plan((1,), 2), [SIGHT], COSTS)
    assert found.length == 2.0
    assert found.drafted == 2.0
    drafting = 3 * (1.0 + 0.5)  # last token and two drafts
    check = 3 * 1.2 + 2.2  # three layers and the head, three tokens wide
    assert found.seconds == pytest.approx(drafting + check)
    assert found.speedup == pytest.approx(6.0 * 2 / found.seconds)
    assert found.drafting_share == pytest.approx(drafting / found.seconds)


def test_n_grams_by_hand():
    """(1 2), none, (4 5 6) cut to two: 1 2 3 | 4 5 6."""
    found = replay(Plan((0,), 2), [SIGHT], COSTS)
    assert found.length == 3.0
    assert found.drafted == 2.0
    assert found.seconds == pytest.approx(0.25 + 4 * 1.2 + 2.2)


def test_a_cascade_by_hand():
    """The first window: 1 agreed, 2 the checker's own; 3 and 9 agreed, 5 its own: the target takes
    1 2 3 and says 4. The second: 5 agreed, 6 its own: both stand, and the text is over."""
    found = replay(Plan((1, 2), 2, window=3), [SIGHT], COSTS)
    assert found.length == 3.0
    assert found.drafted == 3.5
    inner = 3 * 1.5 + 1.2 + 0.7  # a draft of two, the layer above it, its word
    last = 2 * 1.0
    check = 2 * 1.5 + 2.5  # two layers and the head over last token, window of three and two more
    assert found.seconds == pytest.approx(((2 + 1) * inner + 2 * last + 2 * check) / 2)


def test_a_lenient_cascade_by_hand():
    """Strictly 1 stands and 9 comes behind it; leniently 1 2 stand and 3 comes, all of them right,
    the target adds 4; then the exit says 5 where n-grams know nothing."""
    strict = replay(Plan((0, 1), 2, window=1), [SIGHT], COSTS)
    assert strict.length == 2.0
    assert strict.drafted == pytest.approx((2 + 1 + 1) / 3)
    costs = dataclasses.replace(COSTS, narrow=2)
    found = replay(Plan((0, 1), 2, window=1, lenience=0.1), [SIGHT], costs)
    assert found.length == 3.0
    assert found.drafted == 2.0
    draft = 0.25 + 1.2 + 0.7 + 1.0  # n-grams, a layer and its word over three, the last token
    wide, narrow = (3 * costs.at("layer", w) + costs.at("head", w) for w in (4, 2))
    assert found.seconds == pytest.approx(draft + (wide + narrow) / 2)


def test_names_that_the_engine_reads():
    assert Plan((3,), 2).drafter == "early_exit(3, k=2)"
    assert Plan((0, 4, 9), 5, 2).drafter == (
        "cascade(cascade(ngram(k=5), early_exit:4, window=2), early_exit:9, window=2)"
    )

    assert Plan((0, 4), 5, 2, lenience=0.1).drafter == (
        "cascade(ngram(k=5), early_exit:4, window=2, lenience=0.1)"
    )


def test_candidates_and_ranking():
    plans = candidates((2, 1), 2, drafts=(1, 2))
    assert {plan.layers for plan in plans} == {(1, 2)}
    assert len(plans) == 2 * 3 * 3
    assert {plan.layers for plan in candidates((1, 2), 2, ngrams=True)} == {(0, 1), (0, 2)}
    order = ranked([Plan((1,), 2), Plan((2,), 3), Plan((0,), 2)], [SIGHT], COSTS)
    assert [f.plan.layers for f in order] == [(0,), (2,), (1,)]
    assert agreement([SIGHT]) == {1: 0.5, 2: 5 / 6}


def test_no_text():
    with pytest.raises(JspecError, match="no text to calibrate on"):
        replay(Plan((1,), 2), [Sight(BEST[:0], {1: BEST[:0]}, [], {1: []})], COSTS)


L = 4
DEEP = dataclasses.replace(CONFIG, num_hidden_layers=L)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.fixture(scope="module")
def target():
    whole = llama_params(0, config=DEEP)
    quiet = [layer.replace(down=layer.down * 0.2, o=layer.o * 0.2) for layer in whole.layers[2:]]
    return whole.replace(layers=(*whole.layers[:2], *quiet))


@pytest.fixture(scope="module")
def answer(target):
    config = DecodeConfig(llama(DEEP), NoDrafter(), (8,))
    state = run(config, (target, ()), start(config, [PROMPT], max_tokens=48))
    return np.asarray(state.tokens)[0, len(PROMPT) : len(PROMPT) + 48].tolist()


def engine_rounds(target, drafter, params):
    config = DecodeConfig(llama(DEEP), drafter, (drafter.num_draft_nodes + 1,))
    counts = counts_of(run(config, (target, params), start(config, [PROMPT], max_tokens=48)))
    return int(counts.rounds[0])


@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("K", [1, 3])
def test_the_replay_is_what_the_engine_does(target, answer, layer, K):
    """The same number of rounds for the same text."""
    exit = own_exit(target)
    sight = see(target, DEEP, dict.fromkeys((1, 2, 3), exit), PROMPT, answer)
    rounds = engine_rounds(target, EarlyExit(DEEP, layer, K), (target, exit))
    assert 48 / replay(Plan((layer,), K), [sight], COSTS).length == pytest.approx(rounds)
    assert rounds < 48


def test_n_grams_are_replayed_as_the_engine_has_them(target, answer):
    sight = see(target, DEEP, {1: own_exit(target)}, PROMPT, answer)
    assert all(gap[said] == 0 for gap, said in zip(sight.gaps[1], sight.said[1], strict=True))
    named = sight.gaps[1]
    for place, draft in enumerate(sight.ngrams):  # what stands so far ahead is judged there
        assert all(token in gap for token, gap in zip(draft, named[place:], strict=False))
    rounds = engine_rounds(target, NgramDrafter(8), ())
    assert 48 / replay(Plan((0,), 8), [sight], COSTS).length == pytest.approx(rounds)


def test_cascades_are_replayed_nearly_as_the_engine_has_them(target, answer):
    """Behind a first wrong token of a window the replay only knows the right text."""
    mine = (target, own_exit(target))
    sight = see(target, DEEP, dict.fromkeys((1, 2, 3), mine[1]), PROMPT, answer)
    drafter = Cascade(EarlyExit(DEEP, 1, 2), exit_verifier(DEEP, 2), 3)
    rounds = engine_rounds(target, drafter, (mine, mine))
    assert 48 / replay(Plan((1, 2), 2, 3), [sight], COSTS).length == pytest.approx(rounds, rel=0.15)


@pytest.mark.parametrize("lenience", [1.0, 0.2, 1e-30])
def test_n_grams_below_an_exit_are_replayed_as_the_engine_has_them(target, answer, lenience):
    mine = (target, own_exit(target))
    sight = see(target, DEEP, dict.fromkeys((1, 2, 3), mine[1]), PROMPT, answer)
    drafter = Cascade(NgramDrafter(3), exit_verifier(DEEP, 2), 1, lenience)
    rounds = engine_rounds(target, drafter, ((), mine))
    found = replay(Plan((0, 2), 3, 1, lenience), [sight], COSTS)
    assert 48 / found.length == pytest.approx(rounds, rel=0.05)


def test_measured_costs(target):
    costs = measure_costs(target, DEEP, own_exit(target), repeats=3)
    assert costs.num_layers == L
    assert costs.plain() > 0
    assert costs.ngrams > 0
    with pytest.raises(JspecError, match="a model of 2 layers: there are no exits"):
        measure_costs(llama_params(0), CONFIG, own_exit(llama_params(0)))
