from collections import Counter

import pandas as pd
import pytest

from experiments import calibration
from experiments.tests.small_data import catalogue, made, write


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Runs calibration on two small data sets into the file of this name; returns the cells that it computed."""
    monkeypatch.delenv("DELTABAND_DATA", raising=False)
    catalogue(monkeypatch, *made(tmp_path, n=160))
    monkeypatch.setattr(calibration, "STEPS", 10)
    run = calibration.run

    def main(out: str, stop_after: int | None = None) -> Counter:
        computed = Counter()

        def counted(name, features, target, setting, split):
            if len(computed) == stop_after:
                raise KeyboardInterrupt
            computed[name, setting, split] += 1
            return run(name, features, target, setting, split)

        monkeypatch.setattr(calibration, "run", counted)
        arguments = ["--data", str(tmp_path), "--settings", "adam 1e-2", "adamw 1e-2", "--splits", "2"]
        try:
            calibration.main([*arguments, "--out", str(tmp_path / out)])
        except KeyboardInterrupt:
            assert stop_after is not None
        return computed

    return main


def test_an_interrupted_calibration_run_goes_on_where_it_stopped(experiment, tmp_path):
    everything = experiment("whole.csv")
    whole = (tmp_path / "whole.csv").read_bytes()
    assert len(everything) == 8

    before = experiment("parts.csv", stop_after=2)
    after = experiment("parts.csv")
    assert len(before) == 2
    assert before + after == everything  # nothing twice
    assert (tmp_path / "parts.csv").read_bytes() == whole

    table = pd.read_csv(tmp_path / "parts.csv")
    cells = table.groupby(["data", "setting", "split"]).method.agg(list)
    assert len(cells) == 8
    assert all(sorted(methods) == ["boosted", "constant", "formula", "ours"] for methods in cells)
    assert experiment("parts.csv") == Counter()

    (tmp_path / "parts.csv").write_bytes(whole[:-25])  # killed while writing
    assert list(experiment("parts.csv")) == [("second", "adamw 1e-2", 1)]
    assert (tmp_path / "parts.csv").read_bytes() == whole


def test_calibration_goes_on_without_what_is_missing(experiment, tmp_path, capsys):
    (tmp_path / "first.csv.gz").unlink()
    assert {name for name, *_ in experiment("rows.csv")} == {"second"}
    assert capsys.readouterr().err.startswith("missing: first: there is no ")


def test_calibration_goes_on_without_what_is_malformed_and_fails_at_the_end(experiment, tmp_path, capsys):
    write(tmp_path, "a,b,target\n1.5,-2,10\n", "first")
    with pytest.raises(SystemExit) as caught:
        experiment("rows.csv")
    assert caught.value.code == 1
    assert set(pd.read_csv(tmp_path / "rows.csv").data) == {"second"}
    assert capsys.readouterr().err.startswith("malformed: first ")
