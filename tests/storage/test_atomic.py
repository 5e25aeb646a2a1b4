"""Files that are there whole or not at all."""

import stat
import sys
from pathlib import Path

import pytest

from deltaband.storage.container import atomic, writable


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_takes_the_place_of_the_file_at_the_end(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("old")
    with atomic(path) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.suffix == ".csv"
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.csv"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.csv"
    path.write_text("old")

    def half() -> None:
        with atomic(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        half()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.csv"]


def test_nothing_is_overwritten_unless_that_is_allowed(tmp_path):
    path = tmp_path / "a.csv"
    with atomic(path, overwrite=False) as temporary:
        temporary.write_text("first")
    with pytest.raises(FileExistsError, match="exists already"), atomic(path, overwrite=False):
        raise AssertionError("never got here")
    other = tmp_path / "b.csv"
    with pytest.raises(FileExistsError, match="in the meantime"), atomic(other, overwrite=False):
        other.write_text("somebody else's")
    assert path.read_text() == "first"
    assert other.read_text() == "somebody else's"
    assert names(tmp_path) == ["a.csv", "b.csv"]


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_a_new_file_has_ordinary_permissions_and_a_replaced_one_keeps_its_own(tmp_path):
    path, ordinary = tmp_path / "a.csv", tmp_path / "ordinary"
    ordinary.touch()
    with atomic(path) as temporary:  # as a writer that makes a file of its own
        temporary.unlink()
        temporary.touch(mode=0o600)
    assert path.stat().st_mode == ordinary.stat().st_mode
    path.chmod(0o640)
    with atomic(path):
        pass
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with atomic(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_places_that_cannot_be_written_are_refused_at_once(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        writable(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        writable(tmp_path / "missing" / "a.csv")
    with pytest.raises(OSError, match="not a regular file"):
        writable(Path("/dev/null"))
