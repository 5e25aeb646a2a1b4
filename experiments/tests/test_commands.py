"""What is wrong with a command line, or with what it names, is said in a sentence."""

import pytest

from experiments import reproduce, score
from experiments.__main__ import main
from experiments.tests.small_data import options, small


@pytest.mark.parametrize("command", ["reproduce", "energy", "calibration", "noise", "reproduce --workers"])
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


@pytest.mark.parametrize(
    "command",
    [
        "reproduce",
        "score",
        "energy",
        "continued",
        "figure",
        "parameters",
        "calibration",
        "noise",
        "digits",
        "labelsets",
    ],
)
def test_where_results_cannot_be_written_nothing_is_begun(command, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    cases = [("--out", tmp_path, "is not a file"), ("--out", "/dev/null", "is not a file")]
    cases += [("--out", tmp_path / "file" / "new" / "out.csv", "file is not a folder")]
    if command not in ("calibration", "digits", "labelsets"):
        cases += [("--networks", tmp_path / "file", "file is not a folder")]
    for option, path, message in cases:
        with pytest.raises(SystemExit) as caught:
            main([command, option, str(path)])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_command_ends_with_a_line(folder, monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "rows_of", interrupted)
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", *options(folder, "out.csv")])
    assert caught.value.code == 130
    assert capsys.readouterr().err.endswith("interrupted: the same command goes on where it was\n")


def test_without_any_data_there_is_no_evaluation(folder, capsys):
    for name in ("first", "second"):
        (folder / f"{name}.csv.gz").unlink()
    with pytest.raises(SystemExit, match="none of these data sets can be used"):
        main(["reproduce", *options(folder, "out.csv")])
    assert capsys.readouterr().err.count("missing: ") == 2


def test_a_data_set_that_is_named_twice_is_studied_once(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(score, "study", lambda name, protocol: asked.append(name) or [{"data": name, "rank": 1}])
    monkeypatch.setattr(score, "plot", lambda table, path: None)
    main(["score", *options(folder, "score.csv"), "--datasets", "first", "second", "first"])
    assert asked == ["first", "second"]
