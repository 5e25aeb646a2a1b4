"""The score, the figure and the energy target, on small data made here."""

import numpy as np
import pandas as pd
from made_data import options, small

from deltaband import Exact, PredictionIntervals
from experiments import energy, figure, paper_report, parameters, score


def test_all_directions_together_are_exact(folder, first):
    train, test = first.training_and_test(0)
    network = first.members(1)[0].networks[0]
    spectral = score.diagonalise(network, train, test, 1e-2)
    exact = PredictionIntervals(network, weight_decay=1e-2, covariance=Exact()).fit(*train).predict(test.x)
    np.testing.assert_allclose(spectral.widths(np.arange(len(spectral.d))), exact.width, rtol=1e-5)


def test_the_study_of_the_score_covers_every_sketch_and_rank(folder, monkeypatch):
    monkeypatch.setattr(score, "RANKS", (2, 5, 200))
    arguments = options(folder, "score.csv")
    score.main(arguments)
    table = pd.read_csv(folder / "score.csv")
    assert len(table) == 2 * 3 * len(score.METHODS)
    assert (table[table["rank"] == 200].width_error < 1e-4).all()  # more directions than rows: nothing is left out
    assert (table[table["rank"] == 2].width_error > 1e-4).all()
    assert (folder / "score.png").stat().st_size > 10_000
    score.main(arguments)  # nothing is left to do
    assert len(pd.read_csv(folder / "score.csv")) == len(table)
    paper_report.write(folder)
    assert "| first | 2,751 | 108 | 2 |" in (folder / "score.md").read_text()


def test_the_figure_shows_what_the_sketch_keeps(folder, monkeypatch):
    monkeypatch.setattr(figure, "NAME", "first")
    monkeypatch.setattr(figure, "RANK", 5)
    out = folder / "spectra.csv"
    figure.main(options(folder, out.name))
    table = pd.read_csv(out)
    assert table.method.value_counts()["compressed"] <= 5
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_the_energy_target_is_coded_in_three_orders(folder, monkeypatch):
    y = np.array([10.2, 9.8, 2.4, 10.4, 31.0])
    assert energy.codes(y, "numbers").tolist() == [1, 1, 0, 1, 2]  # 2, 10, 31
    assert energy.codes(y, "words").tolist() == [0, 0, 1, 0, 2]  # "10", "2", "31"
    assert energy.codes(y, "appearance").tolist() == [0, 0, 1, 0, 2]
    assert energy.codes(y[::-1], "appearance").tolist() == [0, 1, 2, 1, 1]
    small(monkeypatch, folder, "energy")
    out = folder / "energy.csv"
    arguments = [*options(folder, out.name), "--splits", "2"]
    energy.main(arguments)
    first = out.read_bytes()
    assert pd.read_csv(out).groupby("order").size().to_dict() == {"numbers": 2, "words": 2, "appearance": 2}
    assert "| the paper | 20 | 0.959 |" in out.with_suffix(".md").read_text()
    energy.main(arguments)  # nothing is left to do
    assert out.read_bytes() == first


def test_rank_against_parameters_is_compared_with_the_exact_method_on_all(folder, monkeypatch):
    monkeypatch.setattr(parameters, "NAMES", ("first",))
    monkeypatch.setattr(parameters, "RANKS", (2, 150))
    monkeypatch.setattr(parameters, "SPLITS", 2)
    out = folder / "parameters.csv"
    arguments = options(folder, out.name)
    parameters.main(arguments)
    table = pd.read_csv(out)
    sizes = table.groupby("parameters").p.unique()
    assert [sizes[choice].item() for choice in parameters.LAYERS] == [51, 2601, 2751]
    whole = table[table.parameters == "all"].set_index("rank").width_error
    assert (whole[0] == 0).all()
    assert (whole[150] < 1e-3).all()  # more directions than rows
    assert (whole[2] > 1e-3).all()
    first = out.read_bytes()
    assert "| all | 2,751 | exact |" in out.with_suffix(".md").read_text()
    parameters.main(arguments)  # nothing is left to do
    assert out.read_bytes() == first
