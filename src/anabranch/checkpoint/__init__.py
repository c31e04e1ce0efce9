"""Crash-safe checkpoints: a directory of safetensors files, made whole by a manifest that is written last.

It knows files and tensors by name, not models, optimizers or ranks: the executor decides what belongs in a checkpoint.
It is not for moving tensors between processes. Open ``writing.py`` first: the order of its steps is the promise.
"""

from anabranch.checkpoint.reading import Checkpoint, fit, read, read_newest
from anabranch.checkpoint.state import TensorName, join, split
from anabranch.checkpoint.writing import Group, write

__all__ = ["Checkpoint", "Group", "TensorName", "fit", "join", "read", "read_newest", "split", "write"]
