"""Weights in and out: models by any name, converted once, restored onto any mesh."""

from checkpoints.detokenizer import Detokenizer
from checkpoints.sources import DEFAULT_MODEL
from checkpoints.store import Checkpoint, convert, load
from checkpoints.tokenizer import Tokenizer

__all__ = ["DEFAULT_MODEL", "Checkpoint", "Detokenizer", "Tokenizer", "convert", "load"]
