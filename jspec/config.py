"""Frozen settings of a model. Knows nothing of arrays, files or devices."""

from __future__ import annotations

import dataclasses
from typing import Literal

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The packaged model (see `checkpoints.sources`)."""

RopeKind = Literal["linear", "dynamic", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched beyond the trained context.

    Names and defaults are those of Hugging Face `rope_scaling` / `rope_parameters`; each `kind`
    reads only its own fields.
    """

    kind: RopeKind
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """Context the model was trained on, in tokens (llama3, yarn, dynamic)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Yarn: multiplies cos and sin; None derives it from `factor` (and the two mscales)."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (`jspec.latent`); names as on Hugging Face."""

    kv_lora_rank: int
    """Numbers that keys and values of all heads come of."""
    qk_nope_head_dim: int
    """Of a query or key head, numbers that do not turn with the position; they come first."""
    qk_rope_head_dim: int
    """Numbers that do."""
    v_head_dim: int
    q_lora_rank: int | None = None
    """Numbers that queries come of; None: of the layer's input itself."""

    def __post_init__(self) -> None:
        if self.v_head_dim > self.head_dim:
            raise ValueError(f"{self.v_head_dim=} is above the {self.head_dim} numbers of a key")

    @property
    def head_dim(self) -> int:
        """Numbers of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP (`jspec.experts`); names as on Hugging Face."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    """F of one expert."""
    shared_expert_intermediate_size: int = 0
    """F of the expert that every token takes as well; 0: there is none."""
    shared_expert_gate: bool = False
    """What the shared expert adds is weighed token by token."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """`sigmoid` has a correction bias, too (DeepSeek-V3's `noaux_tc`)."""
    n_group: int = 1
    topk_group: int = 1
    """Groups of experts, and how many of them a token is sent to."""
    norm_topk_prob: bool = True
    """The chosen experts' weights sum to one."""
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring_func not in ("softmax", "sigmoid"):
            raise ValueError(f"{self.scoring_func=} must be softmax or sigmoid")
        if not 1 <= self.topk_group <= self.n_group or self.num_experts % self.n_group:
            raise ValueError(f"{self.topk_group=} of {self.n_group=} of {self.num_experts=}")
        within_reach = self.num_experts // self.n_group * self.topk_group
        if not 1 <= self.num_experts_per_tok <= within_reach:
            raise ValueError(f"{self.num_experts_per_tok=} of {within_reach} within reach")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3); names as on Hugging Face.

    A layer has two parts that may be of another kind: attention (`latent`, `gated_attention`) and
    the MLP (`experts`)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation (Qwen3)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a generation, each by itself."""
    partial_rotary_factor: float = 1.0
    """Share of each query and key head, from its start, that turns with the position."""
    rope_interleave: bool = False
    """Numbers that turn together stand side by side, not half a head apart (DeepSeek)."""
    gated_attention: bool = False
    """What a head attends to is multiplied by the sigmoid of a gate, beside its query in `q`
    (Qwen3-Next)."""
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads=} is not a multiple of {self.num_key_value_heads=}"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(f"{self.rotary_dim=} of {self.head_dim=} must be even and above 0")
        if self.latent is not None:
            self._check_latent(self.latent)

    def _check_latent(self, latent: LatentConfig) -> None:
        if self.head_dim != latent.head_dim:
            raise ValueError(f"{self.head_dim=} is not that of {latent=}")
        if self.num_key_value_heads != self.num_attention_heads or self.gated_attention:
            raise ValueError("latent attention has a key head for each query head, and no gates")

    @property
    def rotary_dim(self) -> int:
        """Numbers of a query or key head that turn with the position."""
        if self.latent is not None:
            return self.latent.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)
