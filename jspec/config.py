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
class ModelConfig:
    """A decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3); names as on Hugging Face."""

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

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads=} is not a multiple of {self.num_key_value_heads=}"
            )
        if self.head_dim % 2:
            raise ValueError(f"{self.head_dim=} must be even for rotary positions")
