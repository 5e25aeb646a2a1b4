"""Atomic replacement of files: a reader finds the old file or the whole new one."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
    """Yield a temporary file beside `path`, which replaces it at the end of the block; if that raises, nothing changes.

    The suffix is that of `path`, for writers that depend on it; permissions are those of the replaced file.
    """
    path = writable(path, overwrite=overwrite)
    temporary = path.with_name(f".{path.stem[:100]}.{secrets.token_hex(6)}{path.suffix}")
    # O_EXCL: never an existing file. 0o666 less the umask is what open() gives; tempfile would give 0o600.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    mode = stat.S_IMODE(temporary.stat().st_mode)
    try:
        yield temporary
        if path.exists():
            if not overwrite:
                raise FileExistsError(f"{path} has been written by another program in the meantime")
            mode = stat.S_IMODE(path.stat().st_mode)
        temporary.chmod(mode)  # a writer may have replaced it by a new file (safetensors does)
        _flush(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        _flush(path.parent)  # the rename itself


def _flush(path: Path) -> None:
    # Windows flushes only files that are open for writing; a folder opens only for reading.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
