"""What is wrong with a command line, or with what it names, is said in a sentence."""

import pytest
from made_data import options, small

from experiments.__main__ import main


@pytest.mark.parametrize("command", ["reproduce", "energy", "calibration", "reproduce --workers"])
@pytest.mark.parametrize("number", ["0", "-3", "1.5", "few", ""])
def test_numbers_of_splits_and_workers_are_positive(command, number, capsys):
    command, option = (command + " --splits").split()[:2]
    with pytest.raises(SystemExit) as caught:
        main([command, f"{option}={number}"])
    assert caught.value.code == 2
    assert f"argument {option}: a positive whole number expected, got {number!r}" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "name"), [("energy", "energy"), ("figure", "wine-red")])
@pytest.mark.parametrize("content", [None, b"nonsense"], ids=["missing", "malformed"])
def test_a_data_set_that_cannot_be_used_ends_a_study_of_it_alone(folder, monkeypatch, command, name, content):
    small(monkeypatch, folder, name)
    path = folder / f"{name}.csv.gz"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match=rf"^{name}[^\n]*{path}[^\n]*$"):  # a text: the exit code is 1
        main([command, *options(folder, "out.csv")])


@pytest.mark.parametrize("content", [None, b"nonsense"], ids=["missing", "malformed"])
def test_without_any_data_there_is_no_study_of_the_score(folder, content, capsys):
    for name in ("first", "second"):
        (folder / f"{name}.csv.gz").unlink()
        if content is not None:
            (folder / f"{name}.csv.gz").write_bytes(content)
    with pytest.raises(SystemExit, match=r"^nothing to draw: none of the data sets can be used"):
        main(["score", *options(folder, "score.csv")])
    assert capsys.readouterr().err.count("missing: " if content is None else "malformed: ") == 2


def test_without_a_command_the_commands_are_listed(capsys):
    for arguments, code in (([], 2), (["nonsense"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == code
        assert "\n  reproduce " in capsys.readouterr().out
