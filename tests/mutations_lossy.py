"""Broken lines of exits by confidence and of the lossy rule, for `mutations.py`."""

# (what, file, line, broken, tests): see `mutations.Mutation`.
EXITS_AND_LOSSY = (
    (
        "early exit: whether a row stops depends on the token that was drawn",
        "jspec/drafters/early_exit.py",
        "sure &= confidence(logits[:, 0], law, context) >= self.stop",
        "sure &= jnp.take_along_axis(law, token[:, None], axis=1)[:, 0] >= self.stop",
        "tests/test_laws_adaptive.py -k 'law and stops'",
    ),
    (
        "early exit: a row that has stopped drafts on",
        "jspec/drafters/early_exit.py",
        "index, going = made.num_read - 1, made.going & sure",
        "index, going = made.num_read - 1, sure",
        "tests/drafters/test_early_exit.py -k 'row_stops and 3'",
    ),
    (
        "early exit: tokens go through the layers when no row drafts",
        "jspec/drafters/early_exit.py",
        "return jnp.any(made.going) & (made.num_read <=",
        "return (made.num_read >= 0) & (made.num_read <=",
        "tests/drafters/test_early_exit.py -k costs_nothing",
    ),
    (
        "adaptive: the law of the first exit for a token that left at a later one",
        "jspec/drafters/adaptive.py",
        "kept = jax.tree.map(functools.partial(rows_where, choice.sure), choice, new)",
        "kept = jax.tree.map(functools.partial(rows_where, choice.sure), choice, new)"
        "._replace(law=choice.law)",
        "tests/test_laws_adaptive.py -k 'law and adaptive'",
    ),
    (
        "adaptive: a row takes the deepest exit that any row needs",
        "jspec/drafters/adaptive.py",
        "kept = jax.tree.map(functools.partial(rows_where, choice.sure), choice, new)",
        "kept = new",
        "tests/drafters/test_adaptive.py -k 'leaves and 3'",
    ),
    (
        "adaptive: deferred layers of the tokens before do not run",
        "jspec/drafters/adaptive.py",
        "target, self.config, (stream,), cache, layers=layers",
        "target, self.config, (jnp.roll(stream, 1, axis=1),), cache, layers=layers",
        "tests/drafters/test_adaptive.py -k 'leaves and 1'",
    ),
    (
        "lossy: the token behind the drafts is that behind the first",
        "jspec/verify.py",
        "logits = jnp.take_along_axis(target_logits, place[..., None], axis=1)",
        "logits = target_logits[:, :1]",
        "tests/test_lossy.py -k keeps_every",
    ),
    (
        "lossy: a lossless drafter takes the rule",
        "jspec/decode.py",
        'if self.is_lossy and not self.drafter.name.startswith("lossy"):',
        "if False:",
        "tests/test_lossy.py -k never_takes",
    ),
    (
        "lossy: every drafter of LLM takes the rule",
        "jspec/llm.py",
        "isinstance(self.drafter, LossySprinter)",
        "isinstance(self.drafter, object)",
        "tests/test_lossy.py -k no_other_name",
    ),
)
