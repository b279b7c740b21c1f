"""Broken lines of early exits, cascades and plans, for `mutations.py`."""

# (what, file, line, broken, tests): see `mutations.Mutation`.
HIERARCHY = (
    (
        "start: keys of the layers that ran are forgotten",
        "jspec/check.py",
        "for i, (keys, values) in enumerate(begun):",
        "for i, (keys, values) in enumerate(begun[:-1]):",
        "tests/drafters/test_early_exit.py -k plain",
    ),
    (
        "cascade: its draws are the target's own",
        "jspec/drafters/cascade.py",
        "jnp.where(sampling.coupled, sampling.seed, words)",
        "jnp.where(sampling.coupled, sampling.seed, sampling.seed)",
        "tests/test_laws_exits.py -k 'two and rejection'",
    ),
    (
        "cascade: draws of its own under the coupled rule, too",
        "jspec/drafters/cascade.py",
        "jnp.where(sampling.coupled, sampling.seed, words)",
        "jnp.where(sampling.coupled, words, words)",
        "tests/drafters/test_cascade.py -k by_the_law",
    ),
    (
        "cascade: laws of the place before",
        "jspec/drafters/cascade.py",
        "laws=after(found.laws, checked.laws)",
        "laws=after(found.laws, jnp.roll(checked.laws, 1, axis=1))",
        "tests/test_laws_exits.py -k 'two and rejection'",
    ),
    (
        "cascade: rows with a full window go on",
        "jspec/drafters/cascade.py",
        "going = found.alive & (found.num_tokens < self.window)",
        "going = found.alive",
        "tests/drafters/test_cascade.py -k speed",
    ),
    (
        "cascade: the last tentative token is never read",
        "jspec/drafters/cascade.py",
        "x.at[rows, found.num_tokens].set(y[:, 0])",
        "x",
        "tests/drafters/test_cascade.py -k plain",
    ),
    (
        "cache: one tentative token more than stands is seen",
        "jspec/cache.py",
        "stand, depths = index < count[:, None], jnp",
        "stand, depths = index <= count[:, None], jnp",
        "tests/drafters/test_cascade.py -k plain",
    ),
    (
        "cache: blocks behind tentative tokens have the positions of the first",
        "jspec/cache.py",
        "depths=_behind(cache.depths, before + own_depths),",
        "depths=_behind(cache.depths, own_depths),",
        "tests/drafters/test_cascade.py -k plain",
    ),
    (
        "head that checks: hands on what it thought two tokens before",
        "jspec/drafters/head_verifier.py",
        "cache = _hand_on(cache, carried)",
        "cache = _hand_on(cache, cache_lib.newest_keys(cache, -1))",
        "tests/drafters/test_cascade.py -k by_the_law",
    ),
    (
        "head that checks: learns from its own drafts",
        "jspec/drafters/head_verifier.py",
        "return self.read(params, state.replace(block=()), context, passage)",
        "return cache_lib.commit(state, passage.num_tokens)",
        "tests/drafters/test_cascade.py -k by_the_law",
    ),
    (
        "plans: exits are asked about the place after",
        "jspec/calibrate.py",
        "place = slice(len(prompt) - 1, len(text) - 1)",
        "place = slice(len(prompt), len(text))",
        "tests/test_plans.py -k engine",
    ),
    (
        "names: an exit may check a later one",
        "jspec/drafter_loading.py",
        "if below >= above > 0:",
        "if below > above > 0:",
        "tests/checkpoints/test_drafter_names.py -k refused",
    ),
)
