"""The tables of outside benchmarks: their scales and networks against naive versions, and a run that is interrupted."""

import importlib

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.outside import boston, cost, cqr, laplace, methods, table
from benchmarks.outside.__main__ import TABLES
from experiments import noise
from experiments.noise import divided
from experiments.tests.small_data import catalogue, made, options
from tests import reference


def test_every_table_has_a_program():
    for name in TABLES:
        assert callable(importlib.import_module(f"benchmarks.outside.{name}").main)


def test_scaled_intervals_cover_as_the_rank_of_the_largest_score_says():
    rng = np.random.default_rng(0)
    residuals, held, new = rng.standard_normal(19), rng.uniform(1, 2, 19), np.array([1.0, 3.0])
    found = table.scaled(residuals, held, np.array([5.0, 6.0]), new, 0.9)
    score = np.sort(np.abs(residuals) / held)[17]  # ⌈20 · 0.9⌉ = 18th smallest
    np.testing.assert_allclose(found.upper, [5 + score, 6 + 3 * score])
    np.testing.assert_allclose(found.lower, [5 - score, 6 - 3 * score])


@pytest.fixture
def networks():
    torch.manual_seed(0)
    return boston.Networks(torch.randn(2, 30, 3), torch.randn(2, 30), seed=0)


def test_the_kernel_of_stacked_networks_is_that_of_their_jacobians(networks):
    kernel = networks.kernel(networks(networks.x)[0]).detach()
    for module, x, K in zip(networks.modules, networks.x, kernel, strict=True):
        _, J = reference.jacobian(module, x)
        np.testing.assert_allclose(K, J @ J.T, rtol=1e-4, atol=1e-4)


def test_the_chosen_damping_has_more_evidence_than_others(networks):
    networks.choose()
    for i, module in enumerate(networks.modules):
        outputs, J = reference.jacobian(module, networks.x[i])
        rss = ((networks.y[i].numpy() - np.ravel(outputs)) ** 2).sum()
        norm2 = sum(float(w.detach().double().square().sum()) for w in module.parameters())

        def evidence(damping, noise2, J=J, rss=rss, norm2=norm2):
            n, p = J.shape
            determinant = np.linalg.slogdet(J.T @ J / damping + np.eye(p))[1]
            return -0.5 * (n * np.log(noise2) + (rss + damping * norm2) / noise2 + determinant)

        damping, noise2 = networks.damping[i].item(), networks.noise[i].item() ** 2
        best = evidence(damping, noise2)
        for factor in (0.8, 1.25):
            assert evidence(damping * factor, noise2) < best
            # the noise at a given λσ⁻² = δ
            assert evidence(damping * factor, noise2 * factor) < best


def test_trained_networks_are_handed_over_as_modules(networks, monkeypatch):
    monkeypatch.setattr(boston, "EPOCHS", 30)
    monkeypatch.setattr(boston, "BEGIN", 10)
    before = networks(networks.x)[1].sub(networks.y).square().mean().item()
    modules = networks.train()
    outputs = torch.stack([module(x)[:, 0] for module, x in zip(modules, networks.x, strict=True)])
    torch.testing.assert_close(outputs, networks(networks.x)[1])
    assert outputs.sub(networks.y).square().mean().item() < before


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """One small data set, and few steps of training."""
    catalogue(monkeypatch, *made(tmp_path, ("first",), n=250))
    monkeypatch.setattr(noise, "STEPS", 20)
    monkeypatch.setattr(methods, "SPLITS", 2)
    monkeypatch.setattr(methods, "TRAINED", ("adam 1e-2",))
    return tmp_path


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")  # the network is not trained
def test_the_hat_matrix_is_that_of_least_squares(quick):
    X, y = methods.data.load("first", quick)
    split = divided(X, y, "random", 0)
    network = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LeakyReLU(), torch.nn.Linear(4, 1)).eval()
    around = methods.Methods(network, 1e-2, split, 0)
    found = around.hat_matrix(torch.nn.Identity())
    F = np.column_stack([np.ones(len(split.training.x)), split.training.x.astype(float)])
    G = np.column_stack([np.ones(len(split.test.x)), split.test.x.astype(float)])
    h = np.array([g @ np.linalg.solve(F.T @ F, g) for g in G])
    width = found.upper - found.lower
    np.testing.assert_allclose(width / width[0], np.sqrt((1 + h) / (1 + h[0])), rtol=1e-5)


def test_a_table_that_was_interrupted_goes_on_and_has_every_method(quick, monkeypatch):
    out = quick / "methods.csv"
    measured = methods.Methods.rows
    calls = []

    def interrupted(self):
        if calls:
            raise KeyboardInterrupt
        calls.append(self.seed)
        return measured(self)

    monkeypatch.setattr(methods.Methods, "rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        methods.main(options(quick, "methods.csv"))
    first = out.read_text()
    monkeypatch.setattr(methods.Methods, "rows", measured)
    methods.main(options(quick, "methods.csv"))
    assert out.read_text().startswith(first)
    found = pd.read_csv(out)
    assert set(found.split) == {0, 1}
    assert found.groupby("split").method.nunique().tolist() == [10, 10]
    assert (found.width > 0).all()
    text = out.with_suffix(".md").read_text()
    assert "| all weights + noise |" in text
    assert "Is the last layer enough?" in text


def test_cqrs_protocol_holds_half_of_the_training_part_out(quick, monkeypatch):
    monkeypatch.setattr(cqr, "SPLITS", {"first": 5})
    X, y = cqr.data.load("first", quick)
    split, unit = cqr.divided(X, y, 0)
    assert len(split.test.y) == 50
    assert len(split.calibration.y) == 100
    assert len(split.training.y) + len(split.held.y) == 100
    order = np.random.default_rng(0).permutation(250)
    assert unit == pytest.approx(y[order[:100]].std() / np.abs(y[order[:100]]).mean())
    cqr.main(options(quick, "cqr.csv"))
    assert pd.read_csv(quick / "cqr.csv").groupby("method").size().tolist() == [5] * 5


def test_bostons_published_figures_stand_beside_ours_lost_ones_included():
    rows = [
        {"seed": seed, "held_out": held, "method": method, "coverage": 0.95, "width": 13.0, "score": 20.0}
        for seed in (1, 2)
        for held, method in (
            ("none", "Laplace"),
            ("half", "split"),
            ("half", "SCP-GN"),
            ("a quarter", "split"),
            ("half", "calibrate"),
        )
    ]
    text = boston.markdown(pd.DataFrame(rows))
    assert "| half | SCP-GN | 13.00 ± 0.00 | 95.0 % | 20.00 | 13.42 | 94.8 % |" in text
    assert "| half | calibrate | 13.00 ± 0.00 | 95.0 % | 20.00 | – | – |" in text
    assert "| none | ACP-GN | not run | not run | not run | 12.22 |" in text


@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")  # the network is not trained
def test_a_posterior_is_judged_by_its_variances_of_held_out_and_test_rows(quick, monkeypatch):
    X, y = methods.data.load("first", quick)
    split = divided(X, y, "random", 0)
    network = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LeakyReLU(), torch.nn.Linear(4, 1)).eval()

    def exact(path, method, repeats, threads, limit):
        problem = laplace.Problem.load(path)
        band = laplace.PredictionIntervals(problem.model, damping=problem.damping)
        variance = np.asarray(band.fit(problem.X, problem.y, progress=False).leverage(problem.new))
        return laplace.laplace.Answer(laplace.laplace.Seconds(1.0, 0.5, 0.1), variance, None)

    monkeypatch.setattr(laplace.laplace, "theirs", exact)
    theirs, ours = (laplace.measured(method, network, split) for method in ("kron", "leverage"))
    assert theirs["score"] == pytest.approx(ours["score"], rel=1e-4)
    assert theirs["seconds"] == 1.5
    rows = [
        {"data": "boston", "split": 0, "method": method} | ours for method in ("leverage", "calibrate", "kron", "valla")
    ]
    assert "| laplace-torch: VaLLA (100 inducing rows, 100 steps) | 1.000 | 1.000 |" in laplace.markdown(
        pd.DataFrame(rows)
    )


def test_costs_are_in_units_of_the_plain_network_and_scores_relative_to_constant_width(monkeypatch, tmp_path):
    steps = [*cost.TRAINED, *cost.POST_HOC]
    seconds = pd.DataFrame(
        [{"data": "concrete", "method": s, "step": s, "seconds": 10.0 if s == "plain" else 5.0} for s in steps]
    )
    of_methods = [
        {"data": "concrete", "setting": "adam 1e-4", "split": 0, "method": m, "score": s}
        for m, s in (("all weights", 2.0), ("last layer", 2.5), ("SCP-GN", 1.5))
    ]
    pd.DataFrame(of_methods).to_csv(tmp_path / "methods.csv", index=False)
    monkeypatch.setattr(cost, "RESULTS", tmp_path)
    found = cost.summary(seconds).set_index("method")
    assert found.cost.unique().tolist() == [0.5]
    assert found.score["last layer"] == pytest.approx(found.score["calibrate, no noise"] * 1.25)
    assert found.score["calibrate"] == pytest.approx(0.772, abs=0.002)  # 0.895 / 1.159 of noise.md
    cost.plot(found.reset_index(), tmp_path / "cost.png")
    assert (tmp_path / "cost.png").stat().st_size > 10_000
