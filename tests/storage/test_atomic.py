"""Files that are there whole or not at all."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deltaband.storage import container
from deltaband.storage.container import atomic, writable


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_takes_the_place_of_the_file_at_the_end(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("old")
    with atomic(path) as temporary:
        assert temporary.parent.parent == tmp_path
        assert temporary.name == "a.csv"
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


WRITER = """
import pathlib, sys, time
from deltaband.storage.container import atomic
with atomic(pathlib.Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    temporary.with_name(".tmp123").write_text("of safetensors")
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="locks of POSIX")
def test_what_a_killed_writer_left_is_removed_by_the_next_and_what_a_live_one_writes_is_not(tmp_path):
    (tmp_path / ".deltaband-notes").mkdir()  # not ours
    command = [sys.executable, "-c", WRITER]
    writers = [subprocess.Popen([*command, tmp_path / name], stdout=subprocess.PIPE) for name in ("a.csv", "b.csv")]
    try:
        for writer in writers:
            assert writer.stdout.readline() == b"writing\n"
        writers[0].kill()
        writers[0].wait()
        hidden = [path for path in tmp_path.iterdir() if path.name != ".deltaband-notes"]
        assert len(hidden) == 2
        with atomic(tmp_path / "c.csv") as temporary:
            temporary.write_text("whole")
        left = [path for path in hidden if path.exists()]
        assert [path.name for path in left[0].iterdir() if path.suffix == ".csv"] == ["b.csv"]
        assert len(left) == 1
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            writer.stdout.close()
    with atomic(tmp_path / "c.csv"):
        pass
    assert names(tmp_path) == [".deltaband-notes", "c.csv"]


def test_a_link_in_the_place_of_a_hidden_folder_is_not_followed(tmp_path):
    mine, folder = tmp_path / "mine", tmp_path / "folder"
    mine.mkdir()
    folder.mkdir()
    (mine / "kept").touch()
    (folder / ".deltaband-0123456789ab").symlink_to(mine)
    with atomic(folder / "a.csv"):
        pass
    assert (mine / "kept").exists()


def test_without_locks_files_are_written_and_nothing_is_taken_for_abandoned(tmp_path, monkeypatch):
    monkeypatch.setattr(container, "fcntl", None)
    (tmp_path / ".deltaband-0123456789ab").mkdir()
    with atomic(tmp_path / "a.csv") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "a.csv").read_text() == "new"
    assert names(tmp_path) == [".deltaband-0123456789ab", "a.csv"]
