"""Tensors and texts in one safetensors file with a digest over all of it: read whole and undamaged, or an error."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..errors import ArtefactError, DamagedArtefactError
from .atomic import atomic

FORMAT = 2
BEGIN = b'{"__metadata__"'


def write(
    path: Path,
    tensors: dict[str, Tensor],
    texts: Mapping[str, str],
    *,
    overwrite: bool = True,
    previous: Path | None = None,
) -> None:
    """The whole file or an OSError, and nothing has changed; the file that was there becomes the `previous` one."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    needed = size(tensors, texts)
    if path.parent.is_dir() and (free := shutil.disk_usage(path.parent).free) < needed:
        raise OSError(errno.ENOSPC, f"{path} would take {needed / 1e6:.4g} MB, and {free / 1e6:.4g} MB are free there")
    metadata = {"format": str(FORMAT), "deltaband": __version__, "torch": torch.__version__, **texts}
    with atomic(path, overwrite=overwrite) as temporary:
        try:
            save_file(tensors, temporary, metadata | {"digest": digest(tensors, metadata)})
        except SafetensorError as error:  # also what the disk says
            raise OSError(f"{path} could not be written: {error}") from error
        if previous is not None and path.exists():
            path.replace(previous)


def read(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and texts; `kind` is the text that tells files of one kind from others."""
    from safetensors import SafetensorError, safe_open

    with path.open("rb"):  # says it well if the file is not there
        pass
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            if "format" not in metadata or kind not in metadata:
                raise ArtefactError(f"{path} is a safetensors file, but no {kind} of deltaband's")
            if int(metadata["format"]) < FORMAT:
                raise ArtefactError(f"{path} was written by a version before the first release: fit again")
            if int(metadata["format"]) > FORMAT:
                raise ArtefactError(
                    f"{path} was written by deltaband {metadata.get('deltaband')} in format {metadata['format']}, and "
                    f"this version, {__version__}, reads format {FORMAT}: update deltaband"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.pop("digest", None) != digest(tensors, metadata):
            raise DamagedArtefactError(f"{path} is damaged: its content does not match its digest")
    except ArtefactError:
        raise
    except (SafetensorError, ValueError, OverflowError, RuntimeError, TypeError) as error:
        kind_of_error = DamagedArtefactError if _begins_as_ours(path) else ArtefactError
        raise kind_of_error(f"{path} is no {kind} of deltaband's, or a damaged one: {error}") from error
    return tensors, metadata


def _begins_as_ours(path: Path) -> bool:
    with path.open("rb") as file:
        begin = file.read(8 + len(BEGIN))
    return not begin or (len(begin) > 8 and BEGIN.startswith(begin[8:]))  # after the length of the header


def size(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> int:
    """About: the header is JSON, with a line for each tensor."""
    text = len(as_json(dict(texts)).encode()) + 300
    return text + sum(tensor.nbytes + len(name) + 90 for name, tensor in tensors.items())


def digest(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    found = hashlib.blake2b(as_json(dict(sorted(texts.items()))).encode(), digest_size=32)
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
