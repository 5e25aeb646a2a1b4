"""Calls of the public API with anything: what comes out is sound, or an error of our own.

`make test` tries some hundred of them, `make soak` thousands.
"""

from __future__ import annotations

import json
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import deltaband
from deltaband import (
    ClassificationIntervals,
    DeltabandWarning,
    Exact,
    FrequentDirections,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
    storage,
)
from tests.support.classifiers import classifier
from tests.support.networks import mlp

PACKAGE = str(Path(deltaband.__file__).parent)
NAN, INF = float("nan"), float("inf")
ODD_NUMBERS = [0, 0.0, -1, NAN, INF, -INF, 1e-310, 1e300, True, "0.5", None, [], 1j]
ENGINES = [
    "auto",
    Exact(),
    Nystrom(5),
    RandomProjection(4),
    ImportantDirections(3),
    RobustFrequentDirections(3),
    FrequentDirections(50),
]
DTYPES = (
    [np.float64] * 6 + [np.float32] * 3 + [np.float16, np.longdouble, np.int64, np.uint8, bool, complex, object, str]
)


class RefusedError(Exception):
    """An error of our own ended a call."""


def own(error: BaseException) -> bool:
    """Raised by a line of this package that raises, as one of the kinds that its documents name."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    kinds = isinstance(error, ValueError | TypeError | MemoryError | OSError)
    return kinds and last.filename.startswith(PACKAGE) and bool(last.line) and "raise" in last.line


def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", DeltabandWarning)
            return function(*args, **options)
    except Exception as error:
        if own(error):
            raise RefusedError from error
        raise


# --- what is brought


@st.composite
def arrays(draw: st.DrawFn, n_rows: int, n_columns: int | None, sane: bool) -> Any:
    """Numbers of any type, size and layout, mostly such as a network takes."""
    odd = not sane and draw(st.integers(0, 4)) == 4
    shape = (n_rows,) if n_columns is None else (n_rows, n_columns)
    if odd:
        shape = draw(st.sampled_from([shape, shape[::-1], (*shape, 1), (n_rows + 1, *shape[1:]), (0, *shape[1:]), ()]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([1.0, 1.0, 1.0, 0.0, 1e-30, 1e8, 1e38, 1e150, 1e300])) if odd else 1.0
    values = np.asarray(rng.standard_normal(shape) * scale)
    dtype = draw(st.sampled_from(DTYPES)) if odd else draw(st.sampled_from(DTYPES[:9]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what does not fit into a type
        values = values.astype(dtype)
    if odd and values.size and values.dtype.kind == "f":
        for value in draw(st.lists(st.sampled_from([NAN, INF, -INF, 0.0, 5e-324]), max_size=2)):
            values.flat[draw(st.integers(0, values.size - 1))] = value
    return as_layout(values, draw(st.sampled_from(LAYOUTS[:-2] if sane else LAYOUTS)))


LAYOUTS = (
    ["plain"] * 6 + ["tensor"] * 9 + ["Fortran", "strided", "reversed", "read-only", "swapped"] * 2 + ["masked", "list"]
)


def as_layout(values: np.ndarray, layout: str) -> Any:
    """The same numbers otherwise."""
    if layout == "tensor" and values.dtype.kind in "fiubc" and values.dtype.itemsize <= 16:
        if values.dtype != np.longdouble:
            return torch.from_numpy(np.ascontiguousarray(values)) if values.ndim else torch.tensor(values.item())
    elif layout == "Fortran":
        return np.asfortranarray(values)
    elif layout == "strided" and values.ndim:
        return np.repeat(values, 2, axis=0)[::2]
    elif layout == "reversed" and values.ndim:
        return values[::-1]
    elif layout == "read-only":
        values.flags.writeable = False
    elif layout == "swapped" and values.dtype.kind in "fi":
        return values.astype(values.dtype.newbyteorder())
    elif layout == "masked":
        return np.ma.masked_array(values)
    elif layout == "list":
        return values.tolist()
    return values


@st.composite
def pairs(
    draw: st.DrawFn, sane: bool, targets: st.SearchStrategy[Any] | None = None, n_outputs: int = 1
) -> tuple[Any, ...]:
    """Arguments of fit: X and y, a list of batches, a generator, a loader, or what is none of them."""
    n = draw(st.sampled_from([60, 40, 25] if sane else [60, 40, 25, 12, 3, 2, 1, 0]))
    x = draw(arrays(n, 3, sane))
    n_columns = draw(st.sampled_from([None, 1])) if n_outputs == 1 else n_outputs
    y = draw(arrays(n, n_columns, sane) if targets is None else targets)
    if callable(y):
        y = y(n)
    ways = ["arrays"] * 5 + ["batches", "generator", "loader"]
    way = draw(st.sampled_from(ways if sane else [*ways, "X alone", "nothing"]))
    if way == "batches":
        return ([(x[i : i + 7], y[i : i + 7]) for i in range(0, n, 7)] if np.ndim(x) and np.ndim(y) else [(x, y)],)
    if way == "generator":
        return (iter([(x, y), (x, y)]),)
    tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    if way == "loader" and tensors and x.ndim and x.shape[:1] == y.shape[:1]:
        return (DataLoader(TensorDataset(x, y), batch_size=8),)
    return {"X alone": (x,), "nothing": (draw(st.sampled_from([None, 3, "x", [], {}])),)}.get(way, (x, y))


ODD_LEVELS = [0.0, 1.0, 95, NAN, "0.9", None, [], [0.5, 2.0], 1e-12, 1 - 1e-12, [[0.5]], np.array([0.9, 0.5])]


def numbers(sane: bool) -> st.SearchStrategy[Any]:
    """For weight_decay and damping."""
    usual = st.floats(1e-3, 0.9)
    return usual if sane else st.one_of(usual, usual, st.sampled_from(ODD_NUMBERS))


def levels(sane: bool) -> st.SearchStrategy[Any]:
    one = st.floats(0.01, 0.9 if sane else 0.99)
    several = st.lists(one, min_size=1, max_size=3)
    return st.one_of(one, several) if sane else st.one_of(one, several, st.sampled_from(ODD_LEVELS))


# --- what comes back


def check_intervals(intervals: Any, x: Any, side: str = "both") -> None:
    """lower ≤ mean ≤ upper, wider for a higher level, a row for each row, and nothing that is not a number."""
    mean, lower, upper = (np.asarray(each, dtype=np.float64) for each in intervals)
    assert len(intervals) == len(x)
    assert np.isfinite(mean).all()
    assert not np.isnan(lower).any()
    assert not np.isnan(upper).any()
    several = isinstance(intervals.level, tuple)
    middle = mean[..., None] if several else mean
    assert lower.shape == upper.shape == (middle.shape if not several else (*mean.shape, len(intervals.level)))
    if side == "lower":
        assert np.isposinf(upper).all()
    elif side == "upper":
        assert np.isneginf(lower).all()
    else:
        assert (lower <= middle).all()
        assert (middle <= upper).all()
    if several:
        order = np.argsort(intervals.level, kind="stable")
        for bound, sign in ((lower[..., order], -1), (upper[..., order], 1)):
            later, earlier = bound[..., 1:], bound[..., :-1]
            assert (sign * later >= sign * earlier).all()
    assert isinstance(intervals.mean, torch.Tensor) == isinstance(x, torch.Tensor)


def check_variances(values: Any, x: Any) -> None:
    found = np.asarray(values, dtype=np.float64)
    assert len(found) == len(x)
    assert (found >= 0).all()  # and no NaN


# --- calls


def regression(data: st.DataObject) -> None:
    """A band from its options to its answers."""
    draw, sane = data.draw, data.draw(st.booleans())
    n_outputs = draw(st.sampled_from([1, 1, 1, 2]))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    model = mlp(hidden=draw(st.sampled_from([2, 12])), dtype=dtype)
    if n_outputs == 2:
        model[2] = torch.nn.Linear(model[2].in_features, 2, dtype=dtype)
    rule = draw(st.sampled_from(["damping", "damping", "weight_decay"] + ["neither"] * (not sane)))
    options: dict[str, Any] = {"engine": draw(st.sampled_from(ENGINES))}
    if rule != "neither":
        options[rule] = draw(numbers(sane))
    if not sane and draw(st.integers(0, 3)) == 3:
        odd = {
            "per_output": st.sampled_from([False, True, "other", None]),
            "outputs": st.sampled_from([0, 1, -1, [0], [1, 0], [0, 0], [], 7, "0", None]),
            "loss": st.sampled_from(["mean", "half_mean", "sum", "huber", None]),
            "batch_size": st.sampled_from([None, 1, 10, 0, -3, 2.5, True]),
            "memory": st.sampled_from([None, 1e9, 1e3, 1, 0, -1, NAN, "1GB"]),
            "parameters": st.sampled_from(["all", "last", "none", ["0.*"], ["x"], [], lambda name, w: "bias" in name]),
            "target_transform": st.sampled_from(
                [None, (0.0, 2.0), (1.0, 0.0), (NAN, 1.0), (1, -3), 3, ([0, 1], [1, 2])]
            ),
            "input_transform": st.sampled_from(
                [None, (0.0, 2.0), ([1, 2, 3], 4.0), ([1, 2], 1.0), (NAN, 1.0), "x", np.tanh, np.sort, lambda x: x[:1]]
            ),
            "targets": st.sampled_from(["scaled", "original", "raw", None]),
            "optimizer": st.sampled_from([*optimisers(model), *optimisers(mlp(dtype=dtype)), "adam", None]),
        }
        name = draw(st.sampled_from(sorted(odd)))
        options[name] = draw(odd[name])
    band = call(PredictionIntervals, model, **options)
    fit = band.partial_fit if draw(st.integers(0, 4)) == 0 else band.fit
    call(fit, *draw(pairs(sane, n_outputs=n_outputs)), progress=False)
    n_rows = call(lambda: band.n_rows_)
    assert n_rows > 0
    then = draw(st.sampled_from(["ask", "calibrate", "go on", "file"] * 2 + ["merge"]))
    if then == "calibrate":
        tune, joint = draw(st.booleans()), draw(st.booleans())
        call(
            band.calibrate,
            *draw(pairs(sane, n_outputs=n_outputs)),
            tune=tune,
            joint=joint,
            seed=draw(st.sampled_from([0, 1] if sane else [0, 1, -1, 0.5])),
        )
    elif then == "go on":
        try:
            call(band.partial_fit, *draw(pairs(sane, n_outputs=n_outputs)))
        except RefusedError:
            assert call(lambda: band.n_rows_) == n_rows
    elif then == "merge":
        call(band.merge, draw(st.sampled_from([band, None, 3])))
    elif then == "file":
        with tempfile.TemporaryDirectory() as folder:
            call(band.save, f"{folder}/x.band", weights=draw(st.booleans()), sample=draw(st.booleans()))
            band = call(PredictionIntervals.load, f"{folder}/x.band", model)
    assert call(band.summary)
    x = draw(arrays(draw(st.sampled_from([0, 1, 5, 30])), 3, sane))
    ask(draw, band, x, sane)


def optimisers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    kinds = [torch.optim.Adam, torch.optim.AdamW]
    return [kind(model.parameters(), weight_decay=decay) for kind in kinds for decay in (0.1, 0.0)]


def ask(draw: st.DrawFn, band: PredictionIntervals, x: Any, sane: bool) -> None:
    question = draw(
        st.sampled_from(
            ["predict"] * 4 + ["variance", "leverage", "prediction", "scale", "error", "spectrum", "loader", "scores"]
        )
    )
    if question == "predict":
        side = draw(st.sampled_from(["both"] * 4 + ["lower", "upper"] + ["middle", None] * (not sane)))
        kind = draw(st.sampled_from(["observation"] * 3 + ["mean"] + ["both", None] * (not sane)))
        check_intervals(call(band.predict, x, draw(levels(sane)), kind=kind, side=side), x, side)
    elif question in ("variance", "leverage"):
        check_variances(call(getattr(band, question), x), x)
    elif question == "loader":
        way = draw(st.sampled_from(["inputs", "pairs", "dictionaries", "numbers", "nothing"]))
        batches = {"inputs": [x], "pairs": [(x, None)], "dictionaries": [{"x": x}], "numbers": [3], "nothing": []}[way]
        found = call(band.predict, iter(batches), draw(levels(sane)))
        check_intervals(found, x)
        rows = draw(
            st.sampled_from([slice(1, 3), slice(None, None, -1), list(range(len(x)))[::2], np.arange(len(x)) % 2 == 0])
        )
        assert len(call(lambda: found[rows])) == (len(rows) if isinstance(rows, list) else len(np.arange(len(x))[rows]))
    elif question == "scores":
        targets = draw(arrays(len(x), draw(st.sampled_from([None, 1, 2])), sane)) if np.ndim(x) else 0
        scores = call(band.evaluate, x, targets, draw(levels(sane)))
        assert ((scores.coverage >= 0) & (scores.coverage <= 1)).all()
        assert (scores.mean_width >= 0).all()
        assert repr(scores)
    elif question == "prediction":
        assert np.isfinite(np.asarray(call(band.predict_mean, x), dtype=np.float64)).all()
    elif question == "scale":
        _, scale = call(band.predict_mean_and_scale, x)
        check_variances(scale, x)
    elif question == "error":
        report = call(
            band.error_report, draw(st.sampled_from([None, x])), draw(st.sampled_from([None, 50, 0, -1, 2.5]))
        )
        assert report.width >= 0
    else:
        spectrum = call(band.spectrum, draw(st.sampled_from([0, 1, -1, "0"])))
        assert (np.asarray(spectrum.singular_values) >= 0).all()


def classification(data: st.DataObject) -> None:
    draw, sane = data.draw, data.draw(st.booleans())
    n_outputs = draw(st.sampled_from([1, 2, 3]))
    model = classifier(n_outputs, dtype=draw(st.sampled_from([torch.float64, torch.float32])))
    options: dict[str, Any] = {draw(st.sampled_from(["damping", "weight_decay"])): draw(numbers(sane))}
    options["engine"] = draw(st.sampled_from(ENGINES))
    options["per_output"] = draw(st.sampled_from([False, False, True] + ["other"] * (not sane)))
    options["classes"] = draw(st.sampled_from([None, None, 0, [1, 0], "predicted"] + [[0, 0], 9, "all"] * (not sane)))
    band = call(ClassificationIntervals, model, **options)
    kinds = [lambda n: np.arange(n) % max(n_outputs, 2)] * 4 + [
        lambda n: torch.arange(n) % 2,
        lambda n: np.arange(n) % 5,
        lambda n: np.full(n, NAN),
        lambda n: np.array(["a"] * n),
        lambda n: np.eye(3)[np.arange(n) % 3],
        lambda n: -np.ones(n),
    ]
    call(band.fit, *draw(pairs(sane, st.sampled_from(kinds[:1] if sane else kinds))), progress=False)
    assert call(band.summary)
    x = draw(arrays(draw(st.sampled_from([0, 1, 5, 30])), 3, sane))
    if draw(st.booleans()):
        check_variances(call(getattr(band, draw(st.sampled_from(["variance", "leverage"]))), x), x)
        return
    found = call(band.predict, x, draw(levels(sane)))
    check_intervals(found.log_odds, x)
    check_intervals(found.probability, x)
    for each in found.probability:
        values = np.asarray(each, dtype=np.float64)
        assert ((values > -1e-30) & (values < 1 + 1e-6)).all()


@cache
def sound_band(n_outputs: int, joint: bool) -> PredictionIntervals:
    model, rng = mlp(), np.random.default_rng(0)
    model[2] = torch.nn.Linear(8, n_outputs, dtype=torch.float64)
    x, y = rng.standard_normal((80, 3)), rng.standard_normal((80, n_outputs))
    band = PredictionIntervals(model, damping=1.0, noise="none").fit(x[:40], y[:40], progress=False)
    return band.calibrate(x[40:], y[40:], joint=joint)


def in_time(data: st.DataObject) -> None:
    """Online intervals and a monitor of a sound band."""
    draw, sane = data.draw, data.draw(st.booleans())
    n_outputs, joint = draw(st.sampled_from([(1, False), (2, False), (2, True)]))
    band = sound_band(n_outputs, joint)
    n = draw(st.sampled_from([0, 1, 5, 30]))
    x = draw(arrays(n, 3, sane))
    y = draw(arrays(n, n_outputs if n_outputs > 1 else draw(st.sampled_from([None, 1])), sane))
    level = draw(st.floats(0.01, 0.9) if sane else st.one_of(st.floats(0.01, 0.99), st.sampled_from(ODD_LEVELS)))
    if draw(st.booleans()):
        chances = st.floats(1e-3, 0.5) if sane else st.one_of(st.floats(1e-3, 0.5), st.sampled_from(ODD_NUMBERS))
        monitor = call(band.monitor, level, false_alarms=draw(chances), window=draw(st.sampled_from([1, 10])))
        call(monitor.update, x, draw(st.sampled_from([y, None])))
        assert monitor.n_rows == len(x)
        assert json.dumps(monitor.to_dict(), allow_nan=False)
        assert monitor.summary()
        return
    method = draw(st.sampled_from(["aci", "pid", "window"] + ["other", None] * (not sane)))
    steps = st.floats(1e-3, 1.0) if sane else st.one_of(st.floats(1e-3, 1e3), st.sampled_from(ODD_NUMBERS))
    settings = {} if method == "window" else {"step": draw(steps)}
    online = call(band.online, level, method, **settings)
    series = draw(st.sampled_from([None, "a", 3, list(range(n))] + [1.5, [None], ["a"] * (n + 1)] * (not sane)))
    if draw(st.booleans()):
        delay = draw(st.sampled_from([0, 2] + [-1, [0], 1.5] * (not sane)))
        check_intervals(call(online.replay, x, y, series=series, delay=delay), x)
    else:
        check_intervals(call(online.predict, x, series=series), x)
        call(online.observe, x, y, series=series)
        assert sum(each["waiting"] for each in online.records()) == 0
    assert all(0 <= each["coverage"] <= 1 for each in online.records() if each["observed"])
    assert online.summary()


def files(data: st.DataObject) -> None:
    """Anything instead of a band's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.band"
        path.write_bytes(data.draw(st.binary(max_size=300)))
        load = data.draw(
            st.sampled_from([lambda: PredictionIntervals.load(path, mlp()), lambda: storage.inspect(path)])
        )
        call(load)


CALLS = {
    "PredictionIntervals": regression,
    "ClassificationIntervals": classification,
    "rows in time": in_time,
    "files": files,
}


def sound_or_refused(name: str, data: st.DataObject) -> bool:
    """Whether there was an answer."""
    try:
        CALLS[name](data)
    except RefusedError:
        return False
    return True
