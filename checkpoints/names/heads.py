"""Draft heads in the layouts of their trainers: file tensor <-> leaf of `jspec.head_params`.

Sources: EAGLE `cnets1.py` and `cnets.py`, SpecForge, speculators (EAGLE-3, MTP), DeepSeek-V3's
README_WEIGHTS, Qwen3-Next, Medusa `medusa_model.py` and vLLM's `medusa.py`. Knows nothing of
shapes or files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from checkpoints.names.llama import HF

Layout = Literal["eagle", "eagle3", "mtp", "nextn", "medusa", "exits"]
VOCABULARY = ("d2t", "t2d", "token_map")
"""Not leaves, but which tokens a head knows: target id less draft id of each draft token, a mask
over the target's tokens, target id of each draft token (vLLM's Medusa)."""

JOINED_NORM = "fc_norms.joined"
"""EAGLE-3's norm over all features, in a file; in memory it is the one entry of `fc_norms`."""

_NO_WEIGHTS = r"(.*\.)?rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight"
"""Buffers of old transformers, and what speculators' training has of the target."""


@dataclasses.dataclass(frozen=True)
class HeadNames:
    """How one layout names the leaves of a head."""

    layout: Layout
    marks: str
    """Only a head in this layout has a tensor of this name (a regular expression, as below)."""
    owned: str
    """Names of tensors that are the head's, where a whole model may be in the same files."""
    leaves: Mapping[str, str]
    """Name in plain spelling -> leaf, `{}` standing for one number; whole names go first."""
    spellings: tuple[tuple[str, str], ...] = ()
    """Patterns, and what takes their place, that turn a name into its plain spelling."""
    written: tuple[str, str] = ("", "")
    """A pattern, and what takes its place, that turns a plain spelling into what we write."""

    @property
    def family(self) -> Literal["eagle", "eagle3", "mtp", "medusa", "exits"]:
        """What the head is, by whatever names."""
        return "mtp" if self.layout == "nextn" else self.layout

    def leaf(self, name: str) -> str | None:
        """The leaf of a file tensor; None for a known non-weight, KeyError when unknown."""
        if re.fullmatch(_NO_WEIGHTS, name):
            return None
        for pattern, plain in self.spellings:
            name = re.sub(pattern, plain, name)
        return name if name in VOCABULARY else _look_up(self.leaves, name)

    def file_name(self, leaf: str) -> str:
        """The name to write for a leaf: one that `leaf` takes back to it."""
        if leaf in VOCABULARY:
            return leaf
        pattern, replacement = self.written
        plain = _look_up({leaf: name for name, leaf in self.leaves.items()}, leaf)
        return re.sub(pattern, replacement, plain, count=1)


def layout_of(names: Iterable[str]) -> HeadNames | None:
    """The layout of the head among tensors of these names, None if there is no head."""
    known = list(names)
    found = (x for x in LAYOUTS if any(re.fullmatch(x.marks, name) for name in known))
    return next(found, None)


_NUMBER = re.compile(r"(?<![^.])(0|[1-9]\d*)(?![^.])")
"""In a name. No leading zeros: "layers.00" must not be a second name of layer 0."""


def _look_up(table: Mapping[str, str], key: str) -> str:
    """What `table` has for `key` itself, or for `key` with its first number left open, or all."""
    opened = [key, _NUMBER.sub("{}", key, count=1), _NUMBER.sub("{}", key)]
    for pattern in opened:
        if pattern in table:
            return table[pattern].format(*_NUMBER.findall(key))
    raise KeyError(key)


_LAYERS = {f"layers.{{}}.{name}": f"layers.{{}}.{field}" for name, field in HF.in_layer.items()}
_MATRICES = ("gate", "up", "down")


def _experts(shared: str) -> dict[str, str]:
    """Of a mixture of experts whose shared expert is called `shared`."""
    mlp, leaf = "layers.{}.mlp.", "layers.{}.experts."
    one = {f"{mlp}experts.{{}}.{x}_proj.weight": f"{leaf}{x}.{{}}" for x in _MATRICES}
    all_take = {f"{mlp}{shared}.{x}_proj.weight": f"{leaf}shared.{x}" for x in _MATRICES}
    return one | all_take | {f"{mlp}gate.weight": f"{leaf}router"}


_LATENT = {
    f"layers.{{}}.self_attn.{name}.weight": f"layers.{{}}.latent.{field}"
    for name, field in {
        "q_a_proj": "q_a",
        "q_a_layernorm": "q_a_norm",
        "q_b_proj": "q_b",
        "kv_a_proj_with_mqa": "kv_a",
        "kv_a_layernorm": "kv_a_norm",
        "kv_b_proj": "kv_b",
    }.items()
}
_EAGLE = _LAYERS | {
    "embed_tokens.weight": "embed",
    "lm_head.weight": "lm_head",
    "fc.weight": "fc",
    "fc.bias": "fc_bias",
}

EAGLE = HeadNames(
    layout="eagle",
    marks=r"(model\.)?fc\.weight",
    owned=r".*",
    leaves=_EAGLE,
    spellings=((r"^model\.", ""),),
)
EAGLE3 = HeadNames(
    layout="eagle3",
    marks=r"(model\.)?(midlayer\..*|layers\.0\.hidden_norm\.weight)",
    owned=r".*",
    leaves=_EAGLE
    | {
        "layers.0.input_layernorm.weight": "embed_norm",
        "layers.0.hidden_norm.weight": "feature_norm",
        "norm.weight": "final_norm",
        "fc_norm.{}.weight": "fc_norms.{}",
        "input_norm.weight": JOINED_NORM,
    },
    spellings=((r"^model\.", ""), (r"^midlayer\.", "layers.0.")),
    written=(r"^layers\.0\.", "midlayer."),
)
MTP = HeadNames(  # Qwen3-Next, and speculators' names for the same
    layout="mtp",
    marks=r"mtp\.fc\.weight|mtp_layers\.0\.input_proj\.weight",
    owned=r"mtp\..*|mtp_layers\..*|d2t|t2d",
    leaves=_EAGLE
    | _experts("shared_expert")
    | {
        "layers.{}.mlp.shared_expert_gate.weight": "layers.{}.experts.shared.switch",
        "pre_fc_norm_embedding.weight": "embed_norm",
        "pre_fc_norm_hidden.weight": "feature_norm",
        "norm.weight": "final_norm",
    },
    spellings=(
        (r"^mtp\.", ""),
        (r"^mtp_layers\.0\.input_proj\.", "fc."),
        (r"^mtp_layers\.0\.token_layernorm\.", "pre_fc_norm_embedding."),
        (r"^mtp_layers\.0\.hidden_layernorm\.", "pre_fc_norm_hidden."),
        (r"^mtp_layers\.0\.final_layernorm\.", "norm."),
        (r"^mtp_layers\.", "layers."),
    ),
    written=(r"^", "mtp."),
)
NEXTN = HeadNames(  # DeepSeek-V3, GLM: one more layer behind the model's own
    layout="nextn",
    marks=r"model\.layers\.\d+\.eh_proj\.weight",
    owned=r"model\.layers\.{}\..*|d2t|t2d",  # with the layer's number: `nextn`
    leaves=_LAYERS
    | _LATENT
    | _experts("shared_experts")
    | {
        "layers.{}.mlp.gate.e_score_correction_bias": "layers.{}.experts.correction_bias",
        "embed_tokens.weight": "embed",
        "enorm.weight": "embed_norm",
        "hnorm.weight": "feature_norm",
        "eh_proj.weight": "fc",
        "shared_head.norm.weight": "final_norm",
        "shared_head.head.weight": "lm_head",
    },
    spellings=(
        (r"^model\.layers\.\d+\.", ""),
        (r"^(self_attn|mlp|input_layernorm|post_attention_layernorm)\.", r"layers.0.\1."),
    ),
)
MEDUSA = HeadNames(
    layout="medusa",
    marks=r"(medusa_heads?\.)?(\d+\.0\.linear|blocks\.\d+\.layers\.\d+)\.weight",
    owned=r"(medusa_heads?\.)?((\d+|blocks|lm_heads)\..*|d2t|t2d|token_map)",
    leaves={
        "{}.0.linear.weight": "blocks.{}",
        "{}.0.linear.bias": "biases.{}",
        "{}.1.weight": "lm_heads.{}",
    },
    spellings=(
        (r"^medusa_heads?\.", ""),
        (r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear."),  # vLLM
        (r"^lm_heads\.(\d+)\.weight$", r"\1.1.weight"),
    ),
)
EXITS = HeadNames(  # ours; leaves with the exits' layers: `exits`
    layout="exits",
    marks=r"exits\.\d+\.(norm|block)\.weight",
    owned=r"exits\..*|d2t|t2d",
    leaves={"exits.lm_head.weight": "lm_head"},
)
LAYOUTS = (MEDUSA, NEXTN, MTP, EAGLE3, EAGLE, EXITS)


def nextn(layer: str) -> HeadNames:
    """`NEXTN` for a head that is layer number `layer`."""
    written = (r"^(layers\.0\.)?", f"model.layers.{layer}.")
    return dataclasses.replace(NEXTN, owned=NEXTN.owned.format(layer), written=written)


def exits(layers: Sequence[int]) -> HeadNames:
    """`EXITS` for exits behind so many layers, ascending: `exits.4.norm.weight` is `norms.0` if
    4 comes first."""
    named: dict[str, str] = {}
    for number, layer in enumerate(layers):
        named |= {
            f"exits.{layer}.norm.weight": f"norms.{number}",
            f"exits.{layer}.block.weight": f"blocks.{number}",
            f"exits.{layer}.block.bias": f"biases.{number}",
        }
    return dataclasses.replace(EXITS, leaves={**EXITS.leaves, **named})


def exit_layers(names: Iterable[str]) -> tuple[int, ...]:
    """Layers before each exit that tensors of these names belong to, ascending."""
    found = (re.match(r"exits\.(0|[1-9]\d*)\.", name) for name in names)
    return tuple(sorted({int(match[1]) for match in found if match}))
