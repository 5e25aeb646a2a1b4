"""Tensors and texts in one safetensors file, with a digest over both; files that are replaced whole or not at all."""

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..errors import ArtefactError, DamagedArtefactError
from ..version import __version__

try:
    import fcntl
except ImportError:  # on Windows, where what a killed writer has left stays
    fcntl = None  # type: ignore[assignment]

FORMAT = 3
HIDDEN, LOCK = ".deltaband-", "lock"  # the name of a folder for temporary files, before twelve digits; a file in it
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


def writable(path: Path, *, overwrite: bool = True) -> Path:
    """Return `path` with links resolved, or raise the OSError that says why it cannot be written."""
    path = path.resolve()
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file")
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}")
    # the new file is created there, even if the old one is writable
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"no permission to write into {path.parent}")
    return path


@contextmanager
def atomic(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield a temporary file of the same name, which replaces `path` at the end of the block; if that raises, nothing
    changes.

    It is in a hidden folder beside `path`, as may be those of writers that were killed, which are removed. Permissions
    are those of the replaced file.
    """
    path = writable(path, overwrite=overwrite)
    _remove_abandoned(path.parent)
    with _hidden_folder(path.parent) as folder:
        temporary = folder / path.name
        # 0o666 less the umask is what open() gives; tempfile would give 0o600
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = stat.S_IMODE(temporary.stat().st_mode)
        yield temporary
        if path.exists():
            if not overwrite:
                raise FileExistsError(f"{path} has been written by another program in the meantime")
            mode = stat.S_IMODE(path.stat().st_mode)
        temporary.chmod(mode)  # a writer may have replaced it by a new file (safetensors does)
        _flush(temporary)
        temporary.replace(path)
    if os.name == "posix":
        _flush(path.parent)  # the rename itself


@contextmanager
def _hidden_folder(parent: Path) -> Iterator[Path]:
    """Make a folder for the time of a block, in which a file is locked: when its process has ended it no longer is."""
    with ExitStack() as stack:
        lock = None
        while lock is None:
            folder = parent / f"{HIDDEN}{secrets.token_hex(6)}"
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir(0o700)
            lock = _locked(folder, or_unlocked=True)  # none if it was removed before that, as if it were abandoned
        stack.enter_context(lock)
        yield folder


def _remove_abandoned(parent: Path) -> None:
    """Remove what writers have left there that were killed; what others are at work on is locked, and stays."""
    for folder in parent.glob(f"{HIDDEN}{'[0-9a-f]' * 12}"):
        if folder.is_dir() and not folder.is_symlink() and (lock := _locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            lock.close()


def _locked(folder: Path, or_unlocked: bool = False) -> IO[str] | None:
    """Return the open file by which a folder is locked; None where another has locked or removed it.

    A system without locks locks nothing.
    """
    with suppress(OSError), ExitStack() as stack:
        lock = stack.enter_context((folder / LOCK).open("a"))
        try:
            if fcntl is None:
                raise OSError(errno.ENOLCK, "no locks")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError) or not or_unlocked:
                raise
        if (folder / LOCK).exists():
            stack.pop_all()
            return lock
    return None


def _flush(path: Path) -> None:
    # Windows flushes only files that are open for writing; a folder opens only for reading.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
