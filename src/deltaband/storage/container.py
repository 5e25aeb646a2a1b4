"""Tensors and texts in one safetensors file, with a digest over both that is checked on reading."""

import errno
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ArtefactError, DamagedArtefactError
from ..version import __version__
from .atomic import atomic

FORMAT = 2
FIRST_BYTES = b'{"__metadata__"'  # of the header, after its length

Tensors = dict[str, Tensor]


def write(
    path: Path, tensors: Tensors, texts: Mapping[str, str], *, overwrite: bool = True, previous: Path | None = None
) -> None:
    """Write a file, or raise an OSError and change nothing; an existing file is moved to `previous` if given."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    needed = size(tensors, texts)
    if path.parent.is_dir() and (free := shutil.disk_usage(path.parent).free) < needed:
        raise OSError(errno.ENOSPC, f"{path} would take {needed / 1e6:.4g} MB, and {free / 1e6:.4g} MB are free there")
    metadata = {"format": str(FORMAT), "deltaband": __version__, "torch": torch.__version__, **texts}
    with atomic(path, overwrite=overwrite) as temporary:
        try:
            save_file(tensors, temporary, metadata | {"digest": digest(tensors, metadata)})
        except SafetensorError as error:  # of the disk as well
            raise OSError(f"{path} could not be written: {error}") from error
        if previous is not None and path.exists():
            path.replace(previous)


def read(path: Path, kind: str) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors and texts of a file of one kind, which has a text of that name: "band" or "checkpoint"."""
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as plain:  # raises a clear error if there is no such file
        start = plain.read(8 + len(FIRST_BYTES))
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            if "format" not in metadata or kind not in metadata:
                raise ArtefactError(f"{path} is a safetensors file, but not a {kind} of deltaband")
            if (written := int(metadata["format"])) != FORMAT:
                writer = f"deltaband {metadata.get('deltaband')} in format {written}"
                advice = f"reads format {FORMAT}: " + ("update deltaband" if written > FORMAT else "fit again")
                raise ArtefactError(f"{path} was written by {writer}, and this version, {__version__}, {advice}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.pop("digest", None) != digest(tensors, metadata):
            raise DamagedArtefactError(f"{path} is damaged: its content does not match its digest")
    except ArtefactError:
        raise
    except (SafetensorError, ValueError, OverflowError, RuntimeError, TypeError) as error:
        ours = not start or (len(start) > 8 and FIRST_BYTES.startswith(start[8:]))  # as far as it goes
        problem = f"{path} is not a {kind} of deltaband, or it is damaged: {error}"
        raise DamagedArtefactError(problem) if ours else ArtefactError(problem) from error
    return tensors, metadata


def size(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> int:
    """Return the approximate bytes of a file, whose header is JSON with a line for each tensor."""
    text = len(as_json(dict(texts)).encode()) + 300
    return text + sum(tensor.nbytes + len(name) + 90 for name, tensor in tensors.items())


def digest(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    """Return the BLAKE2 digest of tensors and texts, whatever their order."""
    found = hashlib.blake2b(as_json(dict(sorted(texts.items()))).encode(), digest_size=32)
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def as_json(value: Any) -> str:
    """Return a value as JSON; arrays as lists, and what JSON does not know as text."""
    return json.dumps(value, ensure_ascii=False, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
