"""Fitted estimators in one file: safetensors with metadata, no pickle anywhere.

The tensors are numbered; the metadata hold, as JSON, the tree of values that names them, what `inspect` shows, and a
digest over all of it. Reading a file runs no code of the file.
"""

from .band_file import inspect, load, save, size, weights

__all__ = ["inspect", "load", "save", "size", "weights"]
