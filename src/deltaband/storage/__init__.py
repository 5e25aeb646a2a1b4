"""A band in one file."""

import importlib
from typing import Any

PUBLIC = ("inspect", "load", "save", "size", "weights")


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(importlib.import_module(".band_file", __name__), name)
    raise AttributeError(name)
