"""Files that are there whole or not at all."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def writable(path: Path, *, overwrite: bool = True) -> Path:
    """The file that `path` stands for, links followed; an OSError that says why if it could not be written."""
    path = path.resolve()
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file")
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}")
    if not os.access(
        path.parent, os.W_OK | os.X_OK
    ):  # the new file is made there, even if the old one could be written
        raise PermissionError(f"no permission to write into {path.parent}")
    return path


@contextmanager
def atomic(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """A temporary file beside `path`, which takes its place at the end of the block if nothing was raised.

    Whatever is raised, KeyboardInterrupt included, leaves `path` as it was and no temporary file. The suffix is that of
    `path`, for writers that go by it; permissions are those of the file replaced, or those of any new file.
    """
    path = writable(path, overwrite=overwrite)
    temporary = path.with_name(f".{path.stem[:100]}.{secrets.token_hex(6)}{path.suffix}")
    # O_EXCL: never somebody else's file. 0o666 less the umask is what open() gives; tempfile would give 0o600.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    mode = stat.S_IMODE(temporary.stat().st_mode)
    try:
        yield temporary
        if path.exists():
            if not overwrite:
                raise FileExistsError(f"{path} has been written by somebody else meanwhile")
            mode = stat.S_IMODE(path.stat().st_mode)
        temporary.chmod(mode)  # a writer may have put a file of its own in the place (safetensors does)
        _flush(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        _flush(path.parent)  # the rename itself


def _flush(path: Path) -> None:
    """Wait until it is on the disk."""
    # Windows flushes only what is open for writing; a folder opens only for reading.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
