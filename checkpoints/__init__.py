"""Weights in and out: models by any name, converted once, restored onto any mesh; draft heads."""

from checkpoints.detokenizer import Detokenizer
from checkpoints.heads import LoadedHead, is_head, load_head
from checkpoints.heads_save import save_head
from checkpoints.hf_save import save_model
from checkpoints.sources import DEFAULT_MODEL, is_default
from checkpoints.store import Checkpoint, convert, load, load_weights
from checkpoints.tokenizer import Tokenizer

__all__ = [
    "DEFAULT_MODEL",
    "Checkpoint",
    "Detokenizer",
    "LoadedHead",
    "Tokenizer",
    "convert",
    "is_default",
    "is_head",
    "load",
    "load_head",
    "load_weights",
    "save_head",
    "save_model",
]
