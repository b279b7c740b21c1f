"""A module imports only modules on lower floors (docs: the layout, as floors)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Lowest first. A package stands for all its modules, which may import one another; a module
# named as well stands where it is named.
FLOORS = (
    ("jspec.draws",),  # one generator, for kernels and engine
    ("pallas_kernels",),
    ("jspec.config", "jspec.sharding", "jspec.errors", "jspec.metrics", "jspec.tree"),
    ("jspec.drafter_names", "jspec.plans"),
    ("jspec.params", "jspec.cache", "jspec.sampling", "jspec.rope"),
    ("jspec.head_params", "jspec.quantised"),
    ("checkpoints",),
    ("jspec.attention", "jspec.verify", "jspec.logprobs", "jspec.layers"),
    ("jspec.experts", "jspec.latent"),
    ("jspec.model",),
    ("jspec.prefill", "jspec.heads", "jspec.drafters.base"),
    ("jspec.drafters.growth",),
    (
        "jspec.drafters.ngram",
        "jspec.drafters.none",
        "jspec.drafters.draft_model",
        "jspec.drafters.head",
        "jspec.drafters.medusa",
        "jspec.drafters.recycling",
        "jspec.drafters.lookahead",
    ),
    ("jspec.drafters.suffix",),
    ("jspec.exits",),
    ("jspec.check", "jspec.drafters.early_exit", "jspec.drafters.verifiers"),
    ("jspec.drafters.head_verifier",),
    ("jspec.drafters.adaptive", "jspec.drafters.lossy_sprinter"),
    ("jspec.drafters", "jspec.drafters.first_of", "jspec.drafters.cascade"),
    ("jspec.decode",),
    ("jspec.engine", "jspec.analysis", "jspec.loading"),
    ("jspec.drafter_loading",),
    ("jspec.llm", "jspec.server"),
    ("jspec.peer", "jspec.accuracy"),
    ("jspec.benchmark",),
    ("jspec.cost_model", "jspec.calibrate"),
    ("jspec.hierarchy",),
    ("jspec.terminal", "jspec.hierarchy_table"),
    ("jspec.train",),
    ("jspec.cli",),
    ("jspec",),
)
PACKAGES = {"pallas_kernels", "checkpoints", "jspec.engine", "jspec.train"}
KERNEL_USERS = {"jspec.attention", "jspec.verify", "jspec.cost_model"}  # the last only counts
TRAINING_ONLY = {"optax", "grain", "matplotlib"}  # what the extra `train` brings
EVERYTHING = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def find_entry(module: str) -> str | None:
    """The entry of FLOORS that stands for a module."""
    if module in EVERYTHING:
        return module
    return next((p for p in PACKAGES if module.startswith(p + ".")), None)


def imported_modules(source: str) -> set[str]:
    """Modules of ours that a source imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            module = node.module or ""
            # `from jspec import cache` imports the module, `from jspec import LLM` the package.
            below = {f"{module}.{alias.name}" for alias in node.names}
            modules = {name for name in below if name in EVERYTHING or is_module(name)}
            found |= modules or {module}
    ours = ("jspec", *PACKAGES, *TRAINING_ONLY)
    return {name for name in found if name.split(".")[0] in ours}


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def broken_rules(module: str, source: str) -> list[str]:
    """What is wrong with the imports of a module, in words."""
    mine = find_entry(module)
    if mine is None:
        return [f"{module} stands on no floor: add it to FLOORS"]
    broken = []
    for name in sorted(imported_modules(source)):
        if name.split(".")[0] in TRAINING_ONLY:
            if mine != "jspec.train":
                broken.append(f"{module} imports {name}: only jspec.train may")
            continue
        entry = find_entry(name)
        if entry is None:
            broken.append(f"{module} imports {name}, which stands on no floor")
        elif entry == mine and mine in PACKAGES:
            continue
        elif EVERYTHING[entry] >= EVERYTHING[mine]:
            broken.append(f"{module} imports {name}, which is not on a lower floor")
        elif entry == "pallas_kernels" and module not in KERNEL_USERS:
            broken.append(f"{module} imports {name}: only {sorted(KERNEL_USERS)} may")
    return broken


def our_modules() -> list[str]:
    paths = [
        p for top in ("jspec", "pallas_kernels", "checkpoints") for p in ROOT.glob(f"{top}/**/*.py")
    ]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return sorted(name.removesuffix(".__init__") for name in names)


@pytest.mark.parametrize("module", our_modules())
def test_imports_go_down(module):
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert broken_rules(module, file.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "rule"),
    [
        ("jspec.model", "import jspec.decode", "not on a lower floor"),
        ("jspec.model", "from jspec import decode as d", "not on a lower floor"),
        ("jspec.model", "def f():\n    from jspec.decode import step", "not on a lower floor"),
        ("jspec.cache", "from jspec.sampling import Sampling", "not on a lower floor"),
        ("jspec.cache", "from jspec import LLM", "not on a lower floor"),
        ("jspec.drafters.ngram", "import jspec.drafters.none", "not on a lower floor"),
        ("checkpoints.convert", "import jspec.model", "not on a lower floor"),
        ("pallas_kernels.dispatch", "import jspec.errors", "not on a lower floor"),
        ("jspec.model", "import pallas_kernels.dispatch", "only"),
        ("jspec.llm", "from jspec.train.trainer import train", "not on a lower floor"),
        ("jspec.llm", "def f():\n    import matplotlib.figure", "only jspec.train may"),
        ("jspec.model", "import jspec.unheard_of", "on no floor"),
        ("jspec.unheard_of", "", "jspec.unheard_of stands on no floor"),
    ],
)
def test_a_broken_rule_is_found(module, source, rule):
    assert len(broken := broken_rules(module, source)) == 1
    assert rule in broken[0]


def test_kept_rules_are_not_found():
    source = "import jax\nfrom jspec import cache as c\nfrom jspec.attention import attend"
    assert broken_rules("jspec.model", source) == []
    assert broken_rules("jspec.attention", "import pallas_kernels.paged_attention") == []
    assert broken_rules("checkpoints.convert", "from checkpoints import files") == []
    assert broken_rules("jspec.train.step", "import optax\nfrom jspec.train import data") == []
