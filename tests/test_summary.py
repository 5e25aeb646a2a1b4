"""What a summary says of a calibration: to people first, then λ, b and γ."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from deltaband import PredictionIntervals
from tests.support.networks import regression

X, Y = regression(400)


def trained(targets=Y, hidden=8, steps=200):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, targets.reshape(len(X), -1).shape[1]))
    model = model.double()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        (model(X[:200]) - targets[:200].reshape(200, -1)).square().mean().backward()
        optimiser.step()
    return model


def line(band, label):
    return next((text for name, text in band.summary_lines() if name.strip() == label), None)


def numbers(text):
    return [float(each) for each in re.findall(r"\d+\.?\d*(?:e[+-]?\d+)?", text)]


@pytest.mark.parametrize("transform", [None, (3.0, 20.0)])
def test_widths_are_those_of_predict_in_the_units_of_predict(transform):
    band = PredictionIntervals(trained(), target_transform=transform).fit(X[:200], Y[:200], progress=False)
    band.calibrate(X[200:], Y[200:])
    width = band.predict(X[200:]).width
    low, high, share = numbers(line(band, "95 % widths"))
    assert low == pytest.approx(float(width.min()), rel=1e-3)
    assert high == pytest.approx(float(width.max()), rel=1e-3)
    output, q = band.calibration_.conformal.outputs[0], band.variance(X[200:]).numpy()
    assert share == pytest.approx(100 * np.mean(1 - 1 / np.sqrt(1 + output.b * q)), abs=0.6)
    assert line(band, "95 % widths").startswith("vary from")
    assert "constant width" not in band.summary()


def test_widths_that_are_the_same_are_said_to_be():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x):
            return self.value + 0 * x[:, 0]

    band = PredictionIntervals(Constant(), noise="none").fit(X[:200], Y[:200], progress=False)
    text = line(band.calibrate(X[200:], Y[200:]), "95 % widths")
    assert re.match(r"are [\d.]+ for all rows; .* makes up \d+ % of them on average", text)
    assert numbers(text)[0] == pytest.approx(float(band.predict(X[:1]).width), rel=1e-3)


def test_several_outputs_have_widths_of_their_own_and_many_have_a_range():
    for m in (2, 6):
        targets = Y[:, None] * 10.0 ** torch.arange(m)
        band = PredictionIntervals(trained(targets)).fit(X[:200], targets[:200], progress=False)
        width = band.calibrate(X[200:], targets[200:]).predict(X[200:]).width
        found = numbers(line(band, "95 % widths"))
        ends = torch.stack([width.amin(dim=0), width.amax(dim=0)], dim=1).flatten()
        expected = ends.tolist() if m == 2 else [float(ends.min()), float(ends.max())]
        assert found[: len(expected)] == pytest.approx(expected, rel=1e-3)


def test_a_calibration_that_made_the_score_worse_says_so():
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(1040, 2, generator=generator, dtype=torch.float64)
    y = X.sum(dim=1) + torch.randn(1040, generator=generator, dtype=torch.float64)
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        solution = torch.linalg.lstsq(torch.cat([X[:1000], torch.ones(1000, 1)], 1), y[:1000, None]).solution
        model.weight.copy_(solution[:2].T)
        model.bias.copy_(solution[2])
    band = PredictionIntervals(model, damping=1e-6).fit(X[:1000], y[:1000], progress=False)
    worse = band.calibrate(X[1000:], y[1000:])  # the formula is right, and 40 rows are few
    before, after = worse.calibration_.score_before, worse.calibration_.score_after
    assert after > before
    text = line(worse, "interval score")
    assert text.endswith(f"{100 * (after / before - 1):.1f} % worse than the formula")
    wrong = PredictionIntervals(model, damping=1e4).fit(X[:500], y[:500], progress=False)  # its p* is too small
    better = wrong.calibrate(X[500:], 5 * y[500:])  # and the noise has grown
    assert better.calibration_.score_after < better.calibration_.score_before
    assert line(better, "interval score").endswith("lower is better)")


def test_what_is_not_known_is_left_out():
    band = PredictionIntervals(trained()).fit(X[:200], Y[:200], progress=False)
    few = band.calibrate(X[200:215], Y[200:215])
    assert line(few, "95 % widths") is None
    assert "nan" not in few.summary()
    targets = torch.stack([Y, 2 * Y], dim=1)
    joint = PredictionIntervals(trained(targets), damping=1.0).fit(X[:200], targets[:200], progress=False)
    joint.calibrate(X[200:], targets[200:], joint=True)
    assert line(joint, "interval score") is None
    assert line(joint, "95 % widths").startswith("vary from")
    assert "nan" not in joint.summary()
