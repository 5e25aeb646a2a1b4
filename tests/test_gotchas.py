"""What is said of wrong uses and of right ones: the table of docs/gotchas.md is made here.

`python -m tests.test_gotchas` writes it anew.
"""

import re
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, PowerTransformer, StandardScaler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from deltaband import ClassificationIntervals, DeltabandWarning, PredictionIntervals, report

DOCUMENT = Path(__file__).parent.parent / "docs" / "gotchas.md"
BEGIN, END = "<!-- uses -->", "<!-- /uses -->"
WRONG, RIGHT = "wrong", "right"
NOTHING = "–"
WD = 1e-2
MEAN, STD = np.array([120.0, 0.05, -3.0, 40.0]), np.array([25.0, 0.01, 2.0, 8.0])
Y_MEAN, Y_STD = 50.0, 17.0
N, HELD = 200, 100  # rows of training and of calibration; as many again are new


class Data(NamedTuple):
    x: np.ndarray  # (n, 4) raw
    y: np.ndarray  # (n,) in original units

    @property
    def scaled(self) -> "Data":
        return Data((self.x - MEAN) / STD, (self.y - Y_MEAN) / Y_STD)


def data(n: int = N + 2 * HELD, noise: float = 0.2, seed: int = 0) -> tuple[Data, Data, Data]:
    """Rows for training, calibration and prediction."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 4))
    y = (np.sin(2 * z[:, 0]) + z[:, 1] * z[:, 2] + 0.5 * z[:, 3]) / 1.4 + noise * rng.normal(size=n)
    every = Data(z * STD + MEAN, y * Y_STD + Y_MEAN)
    cuts = (slice(0, n - 2 * HELD), slice(n - 2 * HELD, n - HELD), slice(n - HELD, n))
    return tuple(Data(every.x[rows], every.y[rows]) for rows in cuts)  # type: ignore[return-value]


def network(inputs: int = 4, outputs: int = 1, hidden: int = 30, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def train(
    model: nn.Module, x: Any, y: Any, loss: Callable[..., Tensor] | None = None, wd: float = WD, steps: int = 300
):
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=wd)
    inputs, targets = torch.as_tensor(x), torch.as_tensor(y)
    for _ in range(steps):
        optimiser.zero_grad()
        found = model(inputs)
        (((found.squeeze(1) - targets) ** 2).mean() if loss is None else loss(found, targets)).backward()
        optimiser.step()
    return model


@cache
def trained(**options: Any) -> nn.Module:
    """A network that was trained on scaled data."""
    return train(network(), *data()[0].scaled, **options)


def band(model: nn.Module | None = None, **options: Any) -> PredictionIntervals:
    return PredictionIntervals(model or trained(), **({"weight_decay": WD} | options))


def fitted(model: nn.Module | None = None, **options: Any) -> PredictionIntervals:
    """A band that is fitted as it should be."""
    rows = data()[0] if "input_transform" in options else data()[0].scaled
    y = data()[0].y if options.get("targets") == "original" else data()[0].scaled.y
    return band(model, **options).fit(rows.x, y, progress=False)


def loader(x: np.ndarray, y: np.ndarray) -> DataLoader:
    return DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=32)


RAW = {"input_transform": (MEAN, STD), "target_transform": (Y_MEAN, Y_STD), "targets": "original"}
UNITS = {"target_transform": (Y_MEAN, Y_STD)}
USES: dict[str, dict[str, Callable[[], Any]]] = {WRONG: {}, RIGHT: {}}


def use(kind: str, text: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        assert text not in USES[kind]
        USES[kind][text] = function
        return function

    return add


def said(function: Callable[[], Any]) -> str:
    """What users are told, without its numbers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            function()
        except ValueError as error:
            caught, text = [], f"error: {error}"
        else:
            assert all(issubclass(each.category, DeltabandWarning) for each in caught), [str(c.message) for c in caught]
            assert all(Path(each.filename) == Path(__file__) for each in caught), "not the user's line"
            text = "; ".join(f"warning: {each.message}" for each in caught)
    return re.sub(r"[−-]?\d[\d.,e+-]*(?<![.,])", "…", text).replace("|", "\\|") or NOTHING


# --- wrong uses: fit


@use(WRONG, "`fit` gets raw inputs, and the network was trained on scaled ones")
def _():
    band().fit(data()[0].x, data()[0].scaled.y, progress=False)


@use(WRONG, "`fit` gets raw targets, and the network was trained on scaled ones")
def _():
    band().fit(data()[0].scaled.x, data()[0].y, progress=False)


@use(WRONG, "`fit` gets raw inputs and raw targets")
def _():
    band().fit(*data()[0], progress=False)


@use(WRONG, "`fit` gets targets in thousandths of the units of training")
def _():
    band().fit(data()[0].scaled.x, 1000 * data()[0].scaled.y, progress=False)


@use(WRONG, "the network's weights were never loaded")
def _():
    band(network()).fit(*data()[0].scaled, progress=False)


@use(WRONG, "the weights were never loaded, and the data are raw")
def _():
    band(network()).fit(*data()[0], progress=False)


@use(WRONG, "raw targets, with `target_transform=` given")
def _():
    band(**UNITS).fit(data()[0].scaled.x, data()[0].y, progress=False)


@use(WRONG, "raw targets in a loader, with `target_transform=` given")
def _():
    band(**UNITS).fit(loader(data()[0].scaled.x, data()[0].y), progress=False)


@use(WRONG, 'scaled targets, with `targets="original"` given')
def _():
    band(**RAW).fit(data()[0].x, data()[0].scaled.y, progress=False)


@use(WRONG, "raw targets, with a logarithm as `target_transform=`")
def _():
    x, y = data()[0].scaled
    model = train(network(), x, np.log(y - y.min() + 2))
    log = FunctionTransformer(np.log, np.exp)
    band(model, target_transform=log).fit(x, y - y.min() + 2, progress=False)


@use(WRONG, "scaled inputs, with `input_transform=` given: they are scaled twice")
def _():
    band(**RAW).fit(data()[0].scaled.x, data()[0].y, progress=False)


@use(WRONG, "targets in another order than the rows")
def _():
    x, y = data()[0].scaled
    band().fit(x, np.random.default_rng(0).permutation(y), progress=False)


@use(WRONG, "columns of the inputs in another order")
def _():
    x, y = data()[0].scaled
    band().fit(x[:, [1, 2, 3, 0]], y, progress=False)


@use(WRONG, "targets of two outputs in the other order")
def _():
    x, y = data()[0].scaled
    both = np.column_stack([y, x[:, 0]])
    model = train(network(outputs=2), x, both, nn.functional.mse_loss)
    band(model).fit(x, both[:, ::-1].copy(), progress=False)


@use(WRONG, "images from 0 to 255, and the network was trained on 0 to 1")
def _():
    x, y = images()
    model = train(image_network(), x, y)
    band(model).fit(255 * x, y, progress=False)


@use(WRONG, "raw targets, in parts: `partial_fit`")
def _():
    x, y = data()[0].scaled.x, data()[0].y
    made = band().partial_fit(x[:100], y[:100]).partial_fit(x[100:], y[100:])
    assert made.n_rows_ == N


@use(WRONG, "a classifier without its weights")
def _():
    x, labels, _ = classified()
    ClassificationIntervals(network(outputs=3), weight_decay=WD).fit(x, labels, progress=False)


@use(WRONG, "a classifier that gets raw inputs")
def _():
    x, labels, model = classified()
    ClassificationIntervals(model, weight_decay=WD).fit(x * STD + MEAN, labels, progress=False)


@use(WRONG, "a classifier whose labels are numbered in another way")
def _():
    x, labels, model = classified()
    ClassificationIntervals(model, weight_decay=WD).fit(x, (labels + 1) % 3, progress=False)


# --- wrong uses: calibrate


@use(WRONG, "`calibrate` gets raw targets")
def _():
    fitted().calibrate(data()[1].scaled.x, data()[1].y)


@use(WRONG, "`calibrate` gets raw targets, with `target_transform=` given")
def _():
    fitted(**UNITS).calibrate(data()[1].scaled.x, data()[1].y)


@use(WRONG, '`calibrate` gets scaled targets, with `targets="original"` given')
def _():
    fitted(**RAW).calibrate(data()[1].x, data()[1].scaled.y)


@use(WRONG, "`calibrate` gets raw inputs")
def _():
    fitted().calibrate(data()[1].x, data()[1].scaled.y)


@use(WRONG, "`calibrate` gets scaled inputs, with `input_transform=` given")
def _():
    fitted(**RAW).calibrate(data()[1].scaled.x, data()[1].y)


@use(WRONG, "`calibrate` gets targets in another order than the rows")
def _():
    x, y = data()[1].scaled
    fitted().calibrate(x, np.random.default_rng(0).permutation(y))


@use(WRONG, "`calibrate` gets training rows")
def _():
    fitted().calibrate(*data()[0].scaled)


# --- wrong uses: predict, evaluate, report


@use(WRONG, "`predict` gets raw inputs")
def _():
    fitted().predict(data()[2].x)


@use(WRONG, "`predict` gets one raw row")
def _():
    fitted().predict(data()[2].x[:1])


@use(WRONG, "`predict` gets raw inputs in a loader")
def _():
    fitted().predict(loader(*data()[2]))


@use(WRONG, "`predict_mean` gets raw inputs")
def _():
    fitted().predict_mean(data()[2].x)


@use(WRONG, "`predict` gets scaled inputs, with `input_transform=` given")
def _():
    fitted(**RAW).predict(data()[2].scaled.x)


@use(WRONG, "`predict` of a classifier gets raw inputs")
def _():
    x, labels, model = classified()
    ClassificationIntervals(model, weight_decay=WD).fit(x, labels, progress=False).predict(data()[2].x)


@use(WRONG, "`evaluate` gets scaled targets, and answers are in original units")
def _():
    fitted(**UNITS).evaluate(*data()[2].scaled)


@use(WRONG, "`evaluate` gets raw inputs")
def _():
    fitted().evaluate(data()[2].x, data()[2].scaled.y)


@use(WRONG, "`evaluate` gets targets in another order than the rows")
def _():
    x, y = data()[2].scaled
    fitted().evaluate(x, np.random.default_rng(0).permutation(y))


@use(WRONG, "`report` gets scaled targets, and answers are in original units")
def _():
    report.page(fitted(**UNITS), *data()[2].scaled)


@use(WRONG, "`report` gets raw inputs")
def _():
    report.page(fitted(), data()[2].x, data()[2].scaled.y)


@use(WRONG, "the network was trained on after `fit`")
def _():
    model = train(network(), *data()[0].scaled)
    made = fitted(model)
    train(model, *data()[1].scaled, steps=5)
    made.predict(data()[2].scaled.x)


# --- wrong uses: transforms


@use(WRONG, "`input_transform=scaler.fit_transform`: rows are scaled by each other")
def _():
    band(input_transform=StandardScaler().fit_transform).fit(data()[0].x, data()[0].scaled.y, progress=False)


@use(WRONG, "`input_transform=` is a scaler that was never fitted")
def _():
    band(input_transform=StandardScaler())


@use(WRONG, "`input_transform=` is a scaler of other columns")
def _():
    band(input_transform=StandardScaler().fit(data()[0].x[:, :3])).fit(*data()[0], progress=False)


@use(WRONG, '`targets="original"` without `target_transform=`')
def _():
    band(targets="original")


# --- right uses


def all_of(made: PredictionIntervals, raw: bool = False, original: bool | None = None) -> None:
    """Calibrate, predict and measure on rows that are what `made` takes."""
    rows = [part if raw else part.scaled for part in data()]
    targets = [part.y if made._task.targets == "original" else part.scaled.y for part in data()]
    known = [part.y if made._task.units is not None else part.scaled.y for part in data()]
    made.predict(rows[2].x)
    made.calibrate(rows[1].x, targets[1]).predict(rows[2].x, level=[0.5, 0.9])
    made.predict(rows[2].x[:1])
    made.evaluate(rows[2].x, known[2])
    report.page(made, rows[2].x, known[2])


@use(RIGHT, "scaled arrays for a network that was trained on them")
def _():
    all_of(fitted())


@use(RIGHT, "the same in loaders")
def _():
    made = band().fit(loader(*data()[0].scaled), progress=False)
    made.calibrate(loader(*data()[1].scaled)).predict(loader(*data()[2].scaled))


@use(RIGHT, "scaled targets, with `target_transform=` given")
def _():
    all_of(fitted(**UNITS))


@use(RIGHT, 'raw data, with `input_transform=`, `target_transform=` and `targets="original"`')
def _():
    all_of(fitted(**RAW), raw=True)


@use(RIGHT, "the same with scikit-learn's `StandardScaler`")
def _():
    x, y = StandardScaler().fit(data()[0].x), StandardScaler().fit(data()[0].y[:, None])
    model = train(network(), x.transform(data()[0].x), y.transform(data()[0].y[:, None])[:, 0])
    all_of(fitted(model, input_transform=x, target_transform=y, targets="original"), raw=True)


@use(RIGHT, "the same with `MinMaxScaler` and `PowerTransformer`")
def _():
    x, y = MinMaxScaler().fit(data()[0].x), PowerTransformer().fit(data()[0].y[:, None])
    model = train(network(), x.transform(data()[0].x), y.transform(data()[0].y[:, None])[:, 0], wd=1e-4)
    all_of(fitted(model, input_transform=x, target_transform=y, targets="original"), raw=True)


@use(RIGHT, "a function as `input_transform=`")
def _():
    all_of(fitted(**RAW | {"input_transform": lambda x: (x - MEAN) / STD}), raw=True)


@use(RIGHT, "a logarithm as `target_transform=`, scaled targets")
def _():
    x, y = data()[0].scaled
    model = train(network(), x, np.log(y - y.min() + 2))
    band(model, target_transform=FunctionTransformer(np.log, np.exp)).fit(x, np.log(y - y.min() + 2), progress=False)


@use(RIGHT, "a saved band with transforms, loaded")
def _():
    with tempfile.TemporaryDirectory() as folder:
        fitted(**RAW).save(f"{folder}/x.band")
        all_of(PredictionIntervals.load(f"{folder}/x.band", trained()), raw=True)


@use(RIGHT, "a network that scales raw inputs itself, and has raw outputs")
def _():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = trained()

        def forward(self, x):
            return self.inner((x - torch.from_numpy(MEAN)) / torch.from_numpy(STD)) * Y_STD + Y_MEAN

    made = band(Whole()).fit(*data()[0], progress=False).calibrate(*data()[1])
    made.predict(data()[2].x)
    made.evaluate(*data()[2])


@use(RIGHT, "a network without weight decay that knows its training rows by heart, calibrated")
def _():
    made = PredictionIntervals(train(network(hidden=60), *data()[0].scaled, wd=0.0, steps=1500))
    made.fit(*data()[0].scaled, progress=False).calibrate(*data()[1].scaled)
    made.evaluate(*data()[2].scaled)


@use(RIGHT, "a network with ten times the weight decay")
def _():
    all_of(fitted(train(network(), *data()[0].scaled, wd=0.1), weight_decay=0.1))


@use(RIGHT, "targets that are nearly all noise")
def _():
    rows, held, new = (part.scaled for part in data(noise=4.0))
    model = train(network(), *rows, wd=0.2)
    made = band(model, weight_decay=0.2).fit(*rows, progress=False).calibrate(*held)
    made.evaluate(*new)


@use(RIGHT, "targets of 1,000,000 ± 1, and a network that returns these")
def _():
    class Lifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = trained()

        def forward(self, x):
            return self.inner(x) + 1e6

    x, y = data()[0].scaled
    band(Lifted()).fit(x, y + 1e6, progress=False)


@use(RIGHT, "features with heavy tails (Cauchy)")
def _():
    rng = np.random.default_rng(0)
    x = rng.standard_cauchy((400, 4))
    y = np.tanh(x[:, 0]) + np.tanh(x[:, 1]) + 0.1 * rng.normal(size=400)
    squashed = FunctionTransformer(np.arctan)
    model = train(network(), np.arctan(x[:200]), y[:200])
    made = band(model, input_transform=squashed).fit(x[:200], y[:200], progress=False)
    made.calibrate(x[200:300], y[200:300]).predict(x[300:])


@use(RIGHT, "a grid twice as wide as the training rows")
def _():
    x, y = data()[0].scaled
    made = band(train(network(1), x[:, :1], y)).fit(x[:, :1], y, progress=False)
    made.predict(np.linspace(2 * x[:, 0].min(), 2 * x[:, 0].max(), 100)[:, None])


@use(RIGHT, "a few rows far outside, among others")
def _():
    x = data()[2].scaled.x.copy()
    x[:10] *= 30
    fitted().predict(x)


@use(RIGHT, "one row outside of the training rows, by twice their range")
def _():
    fitted().predict(np.full((1, 4), 2 * data()[0].scaled.x.max()))


@use(RIGHT, "many rows close to one another (what if?)")
def _():
    row = data()[2].x[:1]
    fitted(**RAW).predict(row + 1e-3 * STD * np.random.default_rng(0).normal(size=(50, 4)))


@use(RIGHT, "a constant column, which is another constant later")
def _():
    rows, held, new = (part.scaled for part in data())
    constant = [
        np.column_stack([part.x, np.full(len(part.x), v)]) for part, v in ((rows, 0.0), (held, 0.0), (new, 1.0))
    ]
    made = band(train(network(5), constant[0], rows.y)).fit(constant[0], rows.y, progress=False)
    made.calibrate(constant[1], held.y).predict(constant[2])


@use(RIGHT, "row weights")
def _():
    x, y = data()[0].scaled
    w = np.random.default_rng(0).uniform(0.5, 2, N)
    band(loss="weighted_mean").fit(x, y, sample_weight=w, progress=False).predict(data()[2].scaled.x)


@use(RIGHT, "two outputs, one that can be learnt and one that hardly can")
def _():
    x, y = data()[0].scaled
    both = np.column_stack([y, 0.3 * y + np.random.default_rng(1).normal(size=N)])
    model = train(network(outputs=2), x, both, nn.functional.mse_loss)
    for per_output in (False, True):
        band(model, per_output=per_output).fit(x, both, progress=False)


@use(RIGHT, "a network that predicts its own variance")
def _():
    x, y = data()[0].scaled
    loss = nn.GaussianNLLLoss()
    model = train(network(outputs=2), x, y, lambda out, y: loss(out[:, 0], y, out[:, 1].exp()), wd=3e-2)
    made = PredictionIntervals(model, weight_decay=3e-2, variance="log_variance").fit(x, y, progress=False)
    made.calibrate(*data()[1].scaled)


@use(RIGHT, "quantiles of skewed targets")
def _():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4))
    y = np.maximum(np.exp(1.5 * rng.normal(size=300) + 0.3 * x[:, 0]) - 1, 0)
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)

    def pinball(out, y):
        above = y[:, None] - out
        return torch.maximum(levels * above, (levels - 1) * above).mean()

    class Ordered(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network(outputs=3)

        def forward(self, x):
            middle, below, above = self.inner(x).T
            return torch.stack([middle - below.exp(), middle, middle + above.exp()], dim=1)

    model = train(Ordered(), x[:200], y[:200], pinball, wd=1e-3)
    made = PredictionIntervals(model, quantiles=(0.1, 0.5, 0.9)).fit(x[:200], y[:200], progress=False)
    made.calibrate(x[200:], y[200:])


@use(RIGHT, "images from 0 to 1, as in training")
def _():
    x, y = images()
    band(train(image_network(), x, y)).fit(x, y, progress=False).predict(x[:50] * 0.9)


@use(RIGHT, "words, as whole numbers")
def _():
    torch.manual_seed(0)
    x = torch.randint(0, 50, (200, 5))
    y = (x.double().mean(dim=1) - 25) / 6
    model = nn.Sequential(nn.Embedding(50, 6), nn.Flatten(), nn.Linear(30, 1)).double()
    band(train(model, x, y)).fit(x, y, progress=False).predict(x[:30])


@use(RIGHT, "a classifier")
def _():
    x, labels, model = classified()
    made = ClassificationIntervals(model, weight_decay=WD).fit(x, labels, progress=False)
    made.predict(data()[2].scaled.x)


@use(RIGHT, "a classifier of a class that one row in twenty has")
def _():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 4))
    labels = (x[:, 0] + 0.5 * rng.normal(size=600) > 1.8).astype(np.int64)
    loss = nn.functional.cross_entropy
    model = train(network(outputs=2), x, labels, loss, wd=1e-3)
    for per_output in (False, True):
        ClassificationIntervals(model, weight_decay=1e-3, per_output=per_output).fit(x, labels, progress=False)


@use(RIGHT, "a fit to some of the training rows, in parts and merged")
def _():
    x, y = data()[0].scaled
    one = band(damping=1.0, weight_decay=None).partial_fit(x[:80], y[:80]).partial_fit(x[80:120], y[80:120])
    two = band(damping=1.0, weight_decay=None).fit(x[120:], y[120:], progress=False)
    assert one.merge(two).n_rows_ == N


def images() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).uniform(size=(200, 1, 4, 4))
    return x, 4 * (x[:, 0, :2].mean(axis=(1, 2)) - x[:, 0, 2:].mean(axis=(1, 2)))


def image_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 1)).double()


@cache
def classified() -> tuple[np.ndarray, np.ndarray, nn.Module]:
    x = data()[0].scaled.x
    labels = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0.5)
    return x, labels, train(network(outputs=3), x, labels, nn.functional.cross_entropy)


# --- the table


@cache
def table() -> str:
    lines = []
    for kind, title in ((WRONG, "wrong use"), (RIGHT, "right use")):
        lines += [f"| {title} | message |", "|---|---|"]
        lines += [f"| {text} | {said(function)} |" for text, function in USES[kind].items()]
        lines.append("")
    return "\n".join(lines)


def cells() -> dict[str, tuple[str, str]]:
    rows = [line.strip("| ").split(" | ") for line in table().splitlines() if line.startswith("|")]
    return {row[0]: row[1] for row in rows}  # type: ignore[misc]


@pytest.mark.parametrize("text", USES[WRONG])
def test_a_wrong_use_is_not_silent(text):
    assert said(USES[WRONG][text]) != NOTHING


@pytest.mark.parametrize("text", USES[RIGHT])
def test_nothing_is_said_of_a_right_use(text):
    assert said(USES[RIGHT][text]) == NOTHING


def test_there_are_at_least_twenty_of_each():
    assert min(map(len, USES.values())) >= 20


def test_the_document_holds_the_table():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == table().strip(), "run python -m tests.test_gotchas"


if __name__ == "__main__":
    made = table()
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
