"""The engine of docs/own_engine.md keeps the contract, and is fitted, saved, loaded and named on the command line."""

import importlib
import os
import subprocess
import sys

import numpy as np
import pytest

from deltaband import ArtefactError, PredictionIntervals
from deltaband.cli.options import engine as parse_engine
from deltaband.cli.output import Refusal, Usage
from deltaband.engines import Problem, plan_fit, registered_engines
from tests.engines.contract import EngineContract
from tests.support.commands import FIT, make_folder
from tests.support.documents import ROOT, blocks
from tests.support.networks import mlp, regression

pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
SOURCE = blocks(ROOT / "docs/own_engine.md")[0].text
X, Y = regression(120)


@pytest.fixture(scope="module")
def diagonal(tmp_path_factory):
    """The class, from a module that only these tests can import."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_engine_of_the_docs.py").write_text(SOURCE)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("own_engine_of_the_docs").Diagonal
    sys.path.remove(str(folder))


class TestDiagonal(EngineContract):
    @pytest.fixture(autouse=True)
    def _engine(self, diagonal):
        type(self).engine = diagonal()


def test_the_example_is_short():
    assert len([line for line in SOURCE.splitlines() if line.strip()]) <= 42


def test_it_is_the_diagonal(diagonal):
    band = PredictionIntervals(mlp(), damping=0.5, engine=diagonal()).fit(X, Y, progress=False)
    exact = PredictionIntervals(mlp(), damping=0.5).fit(X, Y, progress=False)
    assert 0 < band.effective_parameters_ <= 41
    assert np.isnan(band.error_bound_)
    assert not np.allclose(band.variance(X), exact.variance(X))
    assert band.error_report().width > 0


def test_parts_files_and_merging_are_one_fit(diagonal, tmp_path):
    def made():
        return PredictionIntervals(mlp(), damping=0.5, engine=diagonal(scale=2.0))

    whole = made().fit(X, Y, progress=False)
    made().fit(X[:50], Y[:50], progress=False).save(tmp_path / "x.band")
    parts = PredictionIntervals.load(tmp_path / "x.band", mlp())
    assert repr(parts.engine) == "Diagonal(scale=2.0)"
    parts.partial_fit(X[50:80], Y[50:80]).merge(made().fit(X[80:], Y[80:], progress=False))
    np.testing.assert_allclose(parts.variance(X), whole.variance(X), rtol=1e-10)
    assert parts.n_rows_ == 120


def test_a_file_needs_the_module_and_says_so(diagonal, tmp_path):
    PredictionIntervals(mlp(), damping=0.5, engine=diagonal()).fit(X, Y, progress=False).save(tmp_path / "x.band")
    program = (
        "from deltaband import PredictionIntervals; from tests.support.networks import mlp; "
        "PredictionIntervals.load('x.band', mlp())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    python = [sys.executable, "-c", program]
    found = subprocess.run(python, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ArtefactError.__name__ in found.stderr
    assert "no registered class 'Diagonal' of the module 'own_engine_of_the_docs': import" in " ".join(
        found.stderr.split()
    ) or "'DiagonalCovariance' of the module 'own_engine_of_the_docs': import" in " ".join(found.stderr.split())


def test_the_command_line_takes_it_by_module_and_class(diagonal):
    assert parse_engine("own_engine_of_the_docs:Diagonal") == diagonal()
    assert parse_engine("own_engine_of_the_docs:Diagonal:scale=3.5") == diagonal(scale=3.5)
    assert parse_engine("diagonal:scale=3.5") == diagonal(scale=3.5)  # once it is imported
    assert registered_engines()["diagonal"] is diagonal
    with pytest.raises(Usage, match="is not a key=value of own_engine_of_the_docs:Diagonal, which takes scale"):
        parse_engine("own_engine_of_the_docs:Diagonal:rank=3")
    with pytest.raises(Usage, match="has no engine 'np'"):
        parse_engine("own_engine_of_the_docs:np")
    with pytest.raises(Refusal, match="--engine: there is no module 'missing_module'"):
        parse_engine("missing_module:Diagonal")


def test_a_band_is_fitted_with_it_on_the_command_line(tmp_path, monkeypatch, capsys):
    from deltaband.cli import main

    make_folder(tmp_path)
    (tmp_path / "engines_of_mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    assert main([*FIT, "--weight-decay", "1e-3", "--engine", "engines_of_mine:Diagonal", "--out", "d.band"]) == 0
    assert main(["inspect", "d.band"]) == 0
    assert "Diagonal(scale=1.0)" in capsys.readouterr().out
    sys.modules.pop("engines_of_mine")


def test_an_engine_without_a_size_is_in_no_plan(diagonal):
    options = plan_fit(Problem(50_000, 1_000_000, 4, 8_000, 400), None, 1e9).options
    assert not any(isinstance(option.engine, diagonal) for option in options)
