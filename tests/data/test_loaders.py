"""Data that break off: the error is the user's own or names the row; band, calibration and model stay as they were."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from deltaband import ClassificationIntervals, Exact, Nystrom, PredictionIntervals, RandomProjection
from tests.support.classifiers import classifier, labelled
from tests.support.networks import mlp, regression

pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
X, Y = regression(120)
HELD_OUT = regression(60, seed=5)
ASKED = regression(9, seed=7)[0]


class LostError(Exception):
    """Of the user's own."""


class Stalling(Dataset):
    """A row in the middle never comes."""

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        if i == 50:
            torch.multiprocessing.Event().wait()
        return X[i], Y[i]


def batches(wrong=None, at=60, size=20):
    """A loader that may be read again, and breaks before row `at`."""

    class Batches:
        def __iter__(self):
            for start in range(0, len(X), size):
                if start == at and wrong is not None:
                    raise wrong
                yield X[start : start + size], Y[start : start + size]

    return Batches()


def spoilt(where, value, row=73, size=20):
    x, y = X.clone(), Y.clone()
    if where == "inputs":
        x[row, 1] = value
    else:
        y[row] = value
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def calibrated(model):
    band = PredictionIntervals(model, damping=0.5, engine=Exact()).fit(*regression(80, seed=1), progress=False)
    return band.calibrate(*HELD_OUT)


def answers(band):
    """All of a band that can be asked, to the last bit."""
    found = [*band.predict(ASKED, (0.5, 0.9)), *band.predict(ASKED, kind="mean"), band.leverage(ASKED)]
    return [each.numpy().tobytes() for each in found] + [band.summary()]


def seen(model):
    """All of a model that a user could find changed."""
    return (
        [module.training for module in model.modules()],
        [(w.requires_grad, None if w.grad is None else w.grad.clone().numpy().tobytes()) for w in model.parameters()],
        {name: value.numpy().tobytes() for name, value in model.state_dict().items()},
        [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
    )


def used():
    """A model in the middle of its training: modes, gradients, a hook, and a weight that is not trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)).double()
    model.train()
    model[3].eval()
    model(X).sum().backward()
    model[0].bias.requires_grad_(False)
    model[2].register_forward_hook(lambda module, args, output: None)
    return model


STEPS = {
    "fit": lambda band, data: band.fit(data, progress=False),
    "partial_fit": lambda band, data: band.partial_fit(data),
    "calibrate": lambda band, data: band.calibrate(data),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "wrong", [LostError("the disk is gone"), KeyboardInterrupt(), SystemExit(3), MemoryError("full")], ids=repr
)
@pytest.mark.parametrize("at", [0, 60])
def test_what_a_loader_raises_comes_through_and_changes_nothing(step, wrong, at):
    model = used()
    band = calibrated(model)
    before, model_before = answers(band), seen(model)
    with pytest.raises(type(wrong)) as raised:
        STEPS[step](band, batches(wrong, at))
    assert raised.value is wrong
    assert answers(band) == before
    assert seen(model) == model_before


@pytest.mark.parametrize("engine", ["auto", Exact(), Nystrom(20), RandomProjection(10)], ids=repr)
def test_a_loader_that_breaks_once_can_be_read_again(engine):
    band, whole = (PredictionIntervals(mlp(), damping=0.5, engine=engine) for _ in range(2))
    with pytest.raises(LostError):
        band.fit(batches(LostError()), progress=False)
    assert "not fitted" in repr(band)
    assert answers(band.fit(batches(), progress=False)) == answers(whole.fit(batches(), progress=False))


def test_a_loader_that_stalls_ends_in_its_own_timeout():
    model = used()
    band = calibrated(model)
    before, model_before = answers(band), seen(model)
    loader = DataLoader(Stalling(), batch_size=10, num_workers=1, timeout=1)
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        band.fit(loader, progress=False)
    assert answers(band) == before
    assert seen(model) == model_before


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("where", ["inputs", "targets"])
@pytest.mark.parametrize(("value", "kind"), [(np.nan, "NaN"), (-np.inf, "an infinite value")])
def test_a_number_that_is_none_is_named_by_its_row_and_changes_nothing(step, where, value, kind):
    model = used()
    band = calibrated(model)
    before, model_before = answers(band), seen(model)
    with pytest.raises(ValueError, match=f"{where} hold {kind} in row 73"):
        STEPS[step](band, spoilt(where, value))
    assert answers(band) == before
    assert seen(model) == model_before


@pytest.mark.parametrize("engine", [Exact(), Nystrom(20), RandomProjection(10)], ids=repr)
@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_every_engine_names_the_row(engine, where):
    band = PredictionIntervals(mlp(), damping=0.5, engine=engine)
    with pytest.raises(ValueError, match=f"{where} hold NaN in row 73"):
        band.fit(spoilt(where, np.nan), progress=False)
    assert "not fitted" in repr(band)


def test_predict_names_the_row_and_changes_nothing():
    model = used()
    band = calibrated(model)
    before, model_before, x = answers(band), seen(model), X.clone()
    x[73, 0] = np.nan
    for ask in (band.predict, band.variance, band.leverage, band.predict_mean, band.predict_mean_and_scale):
        with pytest.raises(ValueError, match="inputs hold NaN in row 73"):
            ask(x)
    assert answers(band) == before
    assert seen(model) == model_before


def test_a_network_that_gives_no_number_in_the_middle_is_told_by_the_row():
    model = nn.Sequential(nn.Linear(3, 4), Logarithm(), nn.Linear(4, 1)).double()
    nn.init.zeros_(model[0].weight)
    nn.init.ones_(model[0].bias)
    with torch.no_grad():
        model[0].weight[0, 0] = -1.0
    x = torch.zeros(120, 3).double() + 0.01 * torch.arange(120)[:, None].double().sin()
    x[73, 0] = 2.0  # the logarithm of −1
    band = PredictionIntervals(model, damping=0.5)
    with pytest.raises(ValueError, match="the network's outputs hold NaN in row 73"):
        band.fit([(x[i : i + 20], Y[i : i + 20]) for i in range(0, 120, 20)], progress=False)


class Logarithm(nn.Module):
    def forward(self, x):
        return x.log()


@pytest.mark.parametrize("per_output", [False, True])
def test_a_classifier_keeps_its_fit_too(per_output):
    x, y = labelled(100)
    model = classifier(3)
    model.train()
    band = ClassificationIntervals(copy.deepcopy(model), damping=0.7, per_output=per_output).fit(x, y, progress=False)
    before, model_before = band.predict(ASKED), seen(band.model)
    wrong_x, wrong_y = x.clone(), y.double()
    wrong_x[73, 2], wrong_y[73] = np.nan, np.nan

    def breaking():
        yield x[:50], y[:50]
        raise LostError

    class Breaking:
        def __iter__(self):
            return breaking()

    for data, message in (
        ([(wrong_x[i : i + 20], y[i : i + 20]) for i in range(0, 100, 20)], "inputs hold NaN in row 73"),
        ([(x[i : i + 20], wrong_y[i : i + 20]) for i in range(0, 100, 20)], "targets hold NaN in row 73"),
    ):
        with pytest.raises(ValueError, match=message):
            band.fit(data, progress=False)
    with pytest.raises(LostError):
        band.fit(Breaking(), progress=False)
    after = band.predict(ASKED)
    for one, other in zip((*before.log_odds, *before.probability), (*after.log_odds, *after.probability), strict=True):
        assert torch.equal(one, other)
    assert seen(band.model) == model_before


class OneBuffer:
    """A loader that writes every batch to the same memory, as NumPy pipelines do."""

    def __init__(self, x, y, w=None, size=7):
        self.parts, self.size = (x, y) if w is None else (x, y, w), size

    def __iter__(self):
        buffers = [torch.empty_like(part[: self.size]) for part in self.parts]
        for start in range(0, len(self.parts[0]), self.size):
            rows = [part[start : start + self.size] for part in self.parts]
            for buffer, part in zip(buffers, rows, strict=True):
                buffer[: len(part)] = part
            yield tuple(buffer[: len(rows[0])] for buffer in buffers)
        for buffer in buffers:
            buffer.fill_(1e3)


@pytest.mark.parametrize("hidden", [5, 60])  # primal and dual form
@pytest.mark.parametrize("engine", [Exact(), Nystrom(30), RandomProjection(20)], ids=str)
def test_a_loader_may_use_its_memory_again(engine, hidden, tmp_path):
    w = 0.5 + torch.arange(len(X), dtype=torch.float64) % 3
    expected = PredictionIntervals(mlp(hidden=hidden), damping=0.5, engine=engine)
    expected.fit(X, Y, sample_weight=w, progress=False).calibrate(*HELD_OUT)
    band = PredictionIntervals(mlp(hidden=hidden), damping=0.5, engine=engine, batch=tuple)
    band.fit(OneBuffer(X, Y, w), progress=False, checkpoint=tmp_path / "x.ckpt", checkpoint_every=0)
    band.calibrate(OneBuffer(*HELD_OUT))
    assert expected.share_seen_in_training(X, Y) == band.share_seen_in_training(X, Y) == 1.0
    for got, wanted in zip(band.predict(ASKED), expected.predict(ASKED), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-7)
    np.testing.assert_allclose(band.noise_std_, expected.noise_std_, rtol=1e-12)


@pytest.mark.parametrize("hidden", [5, 60])
@pytest.mark.parametrize("engine", [Exact(), Nystrom(30), RandomProjection(20)], ids=str)
def test_arrays_may_be_overwritten_after_the_call(engine, hidden, tmp_path):
    w = 0.5 + torch.arange(len(X), dtype=torch.float64) % 3
    answers = []
    for overwritten in (False, True):
        band = PredictionIntervals(mlp(hidden=hidden), damping=0.5, engine=engine)
        for call, rows, weights in (
            (band.fit, (X, Y), w),
            (band.partial_fit, HELD_OUT, w[:60]),
            (band.calibrate, HELD_OUT, w[:60]),
        ):
            given = [each.clone() for each in (*rows, weights)]
            call(*given[:2], sample_weight=given[2])
            for each in given if overwritten else ():
                each.fill_(1e3)
        band.save(tmp_path / "x.band", sample=True)
        read = PredictionIntervals.load(tmp_path / "x.band", band.model)
        answers.append(
            np.concatenate([each.numpy().ravel() for one in (band, read) for each in one.predict(ASKED)[:3]])
        )
        weights_kept = [piece.extras["weight"].numpy() for fit in band.fits_ for piece in fit.sample.pieces]
        answers.append(np.concatenate(weights_kept).ravel())
    np.testing.assert_array_equal(answers[0], answers[2])
    np.testing.assert_array_equal(answers[1], answers[3])
