"""The score, the figure and the energy target, on small data made here."""

import numpy as np
import pandas as pd
import torch

from deltaband import Exact, PredictionIntervals
from experiments import continued, energy, figure, paper_report, parameters, protocol, reproduce, score
from experiments.protocol import standardised
from experiments.tests.small_data import options, small
from experiments.training import Rows, train


def test_all_directions_together_are_exact(folder, first):
    train, test = first.training_and_test(0)
    network = first.members(1)[0].networks[0]
    spectral = score.diagonalise(network, train, test, 1e-2)
    exact = PredictionIntervals(network, weight_decay=1e-2, engine=Exact()).fit(*train).predict(test.x)
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
    assert "| first | 2,751 | 108 | – | 2 |" in (folder / "score.md").read_text()


def test_the_figure_shows_what_the_sketch_keeps(folder, monkeypatch):
    monkeypatch.setattr(figure, "NAME", "first")
    monkeypatch.setattr(figure, "RANK", 5)
    out = folder / "spectra.csv"
    figure.main(options(folder, out.name))
    table = pd.read_csv(out)
    assert table.method.value_counts()["compressed"] <= 5
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_networks_from_scratch_and_continued_are_compared(folder, monkeypatch):
    small(monkeypatch, folder, "boston")
    monkeypatch.setattr(continued, "NAMES", ("boston",))
    monkeypatch.setattr(reproduce, "RANKS", {"boston": 5})
    out = folder / "continued.csv"
    arguments = [*options(folder, out.name), "--splits", "2"]
    continued.main(arguments)
    first, table = out.read_bytes(), pd.read_csv(out)
    assert len(table) == 2 * len(continued.TRAININGS) * len(continued.METHODS)
    widths = table.pivot_table(index="training", columns="method", values="w_sd")
    scratch, further, smaller = (widths.loc[name] for name in continued.TRAININGS)
    assert (scratch != further).all()
    assert further["exact on 80 %"] == smaller["exact on 80 %"]  # its λ has that n anyway
    assert further["compressed"] != smaller["compressed"]
    reproduce.main([*options(folder, "methods.csv"), "--splits", "2", "--methods", *continued.METHODS])
    same = pd.read_csv(folder / "methods.csv").groupby("method").w_sd.mean()
    np.testing.assert_allclose(scratch[list(same.index)], same, rtol=1e-5)
    assert "| boston | compressed | 1.33 | " in out.with_suffix(".md").read_text()
    continued.main(arguments)  # nothing is left to do
    assert out.read_bytes() == first


def test_a_continued_network_is_the_stopped_one_trained_on(first):
    stopped, epochs, _ = first._stopped("search", first.training)
    rows = [standardised(first.X, first.y, rows)[0] for rows in first.training]
    learnt = Rows(*(torch.from_numpy(np.stack([getattr(r, part) for r in rows])) for part in ("x", "y")))
    seeds = [first._seed("continued", split, 0) for split in first.splits]
    further = [max(e, protocol.EPOCHS_AT_LEAST) for e in epochs]
    trained = train(stopped, learnt, [0, 1], seeds, further, first.recipe, lambda text: None)
    for i, each in enumerate(first.continued()):
        assert each.epochs == further[i]
        for a, b in zip(each.networks[0].parameters(), trained.network(i).parameters(), strict=True):
            assert torch.equal(a, b)
        assert not torch.equal(each.networks[0][0].weight, first.members(1)[i].networks[0][0].weight)


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
