"""jspec: speculative decoding in JAX.

Shape letters, the same in docstrings, annotations and einsum strings:
    B rows of a batch          T tokens in this call       S slots of a row (its capacity)
    K tokens a draft           V vocabulary                D model width
    F MLP width                L layers                    H head size
    N query heads              Nkv key/value heads (K in einsum strings of attention)
"""
