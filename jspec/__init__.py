"""jspec: speculative decoding in JAX.

Shape letters, the same in docstrings, annotations and einsum strings:
    B rows of a batch          T tokens in this call       S slots of a row (its capacity)
    K tokens a draft           V vocabulary                D model width
    F MLP width                L layers                    H head size
    N query heads              Nkv key/value heads (K in einsum strings of attention)
"""

from jspec.attention import attend
from jspec.cache import CacheSpec
from jspec.engine.requests import RequestOutput, SamplingParams, StreamChunk
from jspec.errors import JspecError
from jspec.llm import LLM, enable_compilation_cache
from jspec.loading import from_nnx
from jspec.metrics import Metrics
from jspec.model import Model, Output

__all__ = [
    "LLM",
    "CacheSpec",
    "JspecError",
    "Metrics",
    "Model",
    "Output",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
    "attend",
    "enable_compilation_cache",
    "from_nnx",
]
