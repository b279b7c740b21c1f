"""The Llama family (Llama, Mistral, Qwen2, Qwen3) on Hugging Face and in GGUF files.

Every leaf is a reshape of one file tensor, so a table of names is the whole mapping. Knows
nothing of shapes or files.
"""

from __future__ import annotations

from checkpoints.names import NameTable

_HF_LAYER = {
    "input_layernorm.weight": "input_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.o_proj.bias": "o_bias",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "post_attention_layernorm.weight": "post_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
    "mlp.gate_proj.bias": "gate_bias",
    "mlp.up_proj.bias": "up_bias",
    "mlp.down_proj.bias": "down_bias",
}
_HF_TOP = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "final_norm",
    "lm_head.weight": "lm_head",
}

_GGUF_LAYER = {
    "attn_norm.weight": "input_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_output.bias": "o_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "ffn_norm.weight": "post_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
    "ffn_gate.bias": "gate_bias",
    "ffn_up.bias": "up_bias",
    "ffn_down.bias": "down_bias",
}
_GGUF_TOP = {
    "token_embd.weight": "embed",
    "output_norm.weight": "final_norm",
    "output.weight": "lm_head",
}

HF = NameTable(
    layer="model.layers.{}.",
    in_layer=_HF_LAYER,
    top=_HF_TOP,
    # Buffers that old versions of transformers saved; they follow from the config.
    ignored=r"(model\.layers\.\d+\.self_attn\.|model\.)rotary_emb\.inv_freq",
)
GGUF = NameTable(
    layer="blk.{}.",
    in_layer=_GGUF_LAYER,
    top=_GGUF_TOP,
    # Llama 3's frequency factors; `gguf_config` turns them into a RopeScaling or refuses them.
    ignored=r"rope_freqs\.weight",
)
