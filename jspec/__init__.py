"""jspec: speculative decoding in JAX.

Shape letters, the same in docstrings, annotations and einsum strings:
    B rows of a batch          T tokens in this call       S slots of a row (its capacity)
    K tokens a draft           V vocabulary                D model width
    F MLP width                L layers                    H head size
    N query heads              Nkv key/value heads (K in einsum strings of attention)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jspec.attention import attend
    from jspec.cache import CacheSpec
    from jspec.drafters.growth import DynamicTree, StaticTree
    from jspec.engine.requests import (
        CompletionOutput,
        Logprob,
        RequestOutput,
        SamplingParams,
        StreamChunk,
    )
    from jspec.errors import JspecError
    from jspec.llm import LLM, enable_compilation_cache
    from jspec.loading import from_nnx
    from jspec.metrics import Metrics
    from jspec.model import Model, Output

# Where each public name lives. They are imported when first used, so that the command line can
# answer `--help` without jax, and can set up the environment before jax starts.
_HOMES = {
    "LLM": "jspec.llm",
    "CacheSpec": "jspec.cache",
    "CompletionOutput": "jspec.engine.requests",
    "DynamicTree": "jspec.drafters.growth",
    "JspecError": "jspec.errors",
    "Logprob": "jspec.engine.requests",
    "Metrics": "jspec.metrics",
    "Model": "jspec.model",
    "Output": "jspec.model",
    "RequestOutput": "jspec.engine.requests",
    "SamplingParams": "jspec.engine.requests",
    "StaticTree": "jspec.drafters.growth",
    "StreamChunk": "jspec.engine.requests",
    "attend": "jspec.attention",
    "enable_compilation_cache": "jspec.llm",
    "from_nnx": "jspec.loading",
}

__all__ = [
    "LLM",
    "CacheSpec",
    "CompletionOutput",
    "DynamicTree",
    "JspecError",
    "Logprob",
    "Metrics",
    "Model",
    "Output",
    "RequestOutput",
    "SamplingParams",
    "StaticTree",
    "StreamChunk",
    "attend",
    "enable_compilation_cache",
    "from_nnx",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jspec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
