"""Learnt noise against networks that were trained to know theirs: `python -m experiments noise`.

For each data set, way of training and split there are seven networks of two layers of 50, trained on the same rows and
stopped early by the same 15 % of them: one by squares, five by a Gaussian likelihood (mean and log variance), one by
the pinball loss (seven quantiles). A fifth of the training part is held out; on it all take their conformal step:

- constant: split conformal with absolute residuals, around the plain network as the next three;
- boosted: MAPIE's residual_normalized, the residuals learnt by gradient boosting on a quarter of the calibration rows;
- q alone: `band.calibrate(x, y, noise="none")`;
- learnt: `band.calibrate(x, y)`, which learns the noise;
- mean-variance: the first of the five networks; ensemble: all five, `MeanVarianceEnsemble`;
- quantiles: `QuantileNetwork`, conformalised quantile regression.

Networks are as they were at their best; training ends 100 epochs after that, or after 5 000 steps of 512 rows (sgemm:
3 600 of 2 048). At most 10 000 test rows are looked at. With AdamW there are two studies more: the first 30, 60 and 120
calibration rows alone, and a shift, where the fifth of rows that is highest along the first principal component is the
test set. The rows of a cell are appended to the CSV as it finishes; a run that was interrupted goes on where it was.

The columns, for levels 50, 80 and 95: coverage; mean width and interval score, in standard deviations of the training
targets; the score of a constant width around the method's own centre; coverage among the noisiest fifth of the test
rows, which is told by gradient boosting (gamma loss) of the plain network's residuals on calibration and test rows,
each row by a model of the others; coverage in the worst slab, a fifth or more of the rows between two parallel planes
(Cauchois et al., 2021), which is searched for on half of the test rows and measured on the others; RMSE of the centre.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from mapie.conformity_scores import ResidualNormalisedScore
from mapie.regression import SplitConformalRegressor
from sklearn.ensemble import GradientBoostingRegressor, HistGradientBoostingRegressor
from sklearn.model_selection import KFold, cross_val_predict
from torch import Tensor, nn
from tqdm import tqdm

from deltaband import DeltabandWarning, Intervals, PredictionIntervals, metrics
from deltaband.baselines import MeanVarianceEnsemble, QuantileNetwork
from deltaband.calibration import ConformalScale, conformal_quantiles
from deltaband.calibration.conformal import EachOutput
from deltaband.data.inputs import Inputs
from deltaband.fitting.fit import KnownRows
from deltaband.sklearn import BandRegressor

from . import data
from .arguments import RESULTS, on_data, positive
from .calibration import SETTINGS
from .errors import Unusable
from .processes import WORKERS_HELP, in_processes
from .progress import SECONDS, beside
from .protocol import Samples, load, save, standardised
from .rows import Key, Rows
from .training import Loss, Recipe, Report, Stack, search, squared_error
from .training import Rows as Learnt

LEVELS = (0.5, 0.8, 0.95)
QUANTILES = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)
MEMBERS = 5
LOG_VARIANCES = -10.0, 10.0  # a network that knows a row by heart must not be surer than that
KEY = ("data", "setting", "test", "split")  # of the rows of results
NOISE_RESULTS = RESULTS / "noise.csv"
STEPS, PATIENCE = 5_000, 100
RECIPES = {"sgemm": (Recipe(batch=2_048, rate=3e-3), 3_600)}
TOGETHER = 5  # splits whose networks are trained at once
TEST_ROWS_AT_MOST = 10_000
FEW_ROWS = (30, 60, 120)
SHIFTED_SPLITS = 3
SPLITS_HELP = f"the first N (default 10); networks are trained for whole groups of {TOGETHER} splits"


def gaussian(outputs: Tensor, y: Tensor) -> Tensor:
    """The negative log-likelihood of mean and log variance, (m, b, 2)."""
    mean, log_variance = outputs[:, :, 0], outputs[:, :, 1].clamp(*LOG_VARIANCES)
    return 0.5 * (log_variance + (y - mean) ** 2 * torch.exp(-log_variance))


def pinball(outputs: Tensor, y: Tensor, quantiles: Sequence[float] = QUANTILES) -> Tensor:
    """The mean over quantiles, (m, b, k)."""
    levels, above = torch.tensor(quantiles), y[:, :, None] - outputs
    return torch.maximum(levels * above, (levels - 1) * above).mean(dim=2)


class Kind(NamedTuple):
    """Of networks."""

    outputs: int
    loss: Loss
    members: int


KINDS = {
    "plain": Kind(1, squared_error, 1),
    "mean-variance": Kind(2, gaussian, MEMBERS),
    "quantiles": Kind(len(QUANTILES), pinball, 1),
}


class Bounded(nn.Module):
    """Mean and log variance, this within what the likelihood took it for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return torch.cat([y[:, :1], y[:, 1:].clamp(*LOG_VARIANCES)], dim=1)


class Split(NamedTuple):
    """The rows of a split, in units of the training rows."""

    training: Samples
    held: Samples  # for early stopping
    calibration: Samples
    test: Samples


def divided(X: np.ndarray, y: np.ndarray, test: str, split: int) -> Split:
    """Training rows, a fifth of them for calibration and 15 % of the rest for early stopping, and test rows."""
    order = np.random.default_rng(split).permutation(len(y))
    if test == "shifted":
        std = X.std(axis=0)
        units = (X - X.mean(axis=0)) / np.where(std > 0, std, 1.0)
        component = np.linalg.eigh(units.T @ units)[1][:, -1]
        along = units @ (component * np.sign(component[np.abs(component).argmax()]))
        highest = np.zeros(len(y), dtype=bool)
        highest[np.argsort(along, kind="stable")[int(0.8 * len(y)) :]] = True
        order = np.concatenate([order[~highest[order]], order[highest[order]]])
        n_train = int((~highest).sum())
    else:
        n_train = int(0.9 * len(y))
    calibration, training, tested = np.split(order, [int(0.2 * n_train), n_train])
    held = int(0.15 * len(training))
    parts = training, training[held:], training[:held], calibration, tested[:TEST_ROWS_AT_MOST]
    return Split(*standardised(X, y, *parts)[1:])


def train(
    part: Part, splits: Sequence[Split], folder: Path, report: Report, kinds: Mapping[str, Kind] = KINDS
) -> dict[str, list[list[nn.Module]]]:  # by kind, for each split
    """The networks of all splits, trained at once, unless they were before."""
    recipe, steps = RECIPES.get(part.name, (Recipe(), STEPS))
    optimiser, weight_decay = SETTINGS[part.setting]
    recipe = recipe._replace(weight_decay=weight_decay)
    rows, held = (_stacked([split[i] for split in splits]) for i in (0, 1))
    epochs = max(1, steps // -(-rows.x.shape[1] // recipe.batch))
    found = {}
    for name, kind in kinds.items():
        path = folder / f"noise-{part}-{name}.safetensors".replace(" ", "-")
        conditions = json.dumps([list(map(float, (rows.x.sum(), rows.y.sum()))), recipe, epochs, PATIENCE])
        kept = load(path, conditions)
        if kept is None:
            seeds = [
                int(np.random.SeedSequence([split, member, *name.encode()]).generate_state(1)[0])
                for split in part.splits
                for member in range(kind.members)
            ]
            owner = np.repeat(np.arange(len(splits)), kind.members).tolist()
            stack, *_ = search(
                Stack.initial(rows.x.shape[2], seeds, outputs=kind.outputs),
                rows,
                held,
                owner,
                seeds,
                recipe,
                PATIENCE,
                lambda text, name=name: report(f"{part}, {name}: {text}"),
                loss=kind.loss,
                decoupled=optimiser is torch.optim.AdamW,
                epochs_at_most=epochs,
                best_of_all=True,
            )
            kept = stack, {}
            save(path, kept, conditions)
        networks = [kept[0].network(i) for i in range(len(kept[0]))]
        networks = [Bounded(network) for network in networks] if kind.loss is gaussian else networks
        found[name] = [networks[i : i + kind.members] for i in range(0, len(networks), kind.members)]
    return found


def _stacked(parts: Sequence[Samples]) -> Learnt:
    return Learnt(*(torch.from_numpy(np.stack(column)) for column in zip(*parts, strict=True)))


class Ours:
    """`calibrate` without learnt noise and with it, for any number of calibration rows, from one pass over the rows."""

    def __init__(self, model: nn.Module, weight_decay: float, split: Split) -> None:
        self.band = PredictionIntervals(model, weight_decay=weight_decay)
        self.band.fit(*split.training, progress=False)
        self.band.calibrate(*split.calibration, noise="auto")
        calibration = self.band._calibration
        assert calibration is not None
        assert calibration.guard is not None
        self.calibration, self.guard = calibration, calibration.guard
        self.outputs, self.rows = self._known(split.test.x)
        few = split.calibration.x[: max(FEW_ROWS)]
        outputs, known = self._known(few)
        self.residuals, self.q = split.calibration.y[: len(few)] - outputs, known.q[0]

    def _known(self, x: np.ndarray) -> tuple[np.ndarray, KnownRows]:
        outputs, _, known = self.band.spec.compared(self.band.fits_, self.calibration, Inputs.of(x))
        return outputs[:, 0], known

    def intervals(self, n: int | None = None) -> dict[str, Intervals]:
        """By all calibration rows, or the first n; the guard of learnt noise is the method without it."""
        conformal, guard = self.calibration.conformal, self.guard
        if n is not None:
            conformal, guard = self._by(n, conformal), self._by(n, guard)
        methods = {"q alone": (guard, None), "learnt": (conformal, guard)}
        found = {}
        for name, (conformal, guard) in methods.items():
            calibration = replace(self.calibration, conformal=conformal, guard=guard)
            bounds = (bound[:, 0] for bound in calibration.bounds(self.rows, LEVELS, "both"))
            found[name] = Intervals(self.outputs, *(self.outputs[:, None] + bound for bound in bounds), LEVELS)
        return found

    def _by(self, n: int, conformal: EachOutput) -> EachOutput:
        scales = conformal.outputs[0].scales
        return EachOutput((ConformalScale.fit(self.residuals[:n], self.q[:n], scales),))


def rows_of_cell(part: Part, split: int, rows: Split, networks: dict[str, list[nn.Module]]) -> list[dict[str, object]]:
    """All methods, by all calibration rows and, where that is asked for, by few."""
    (plain,), members, (quantiles,) = (networks[name] for name in KINDS)
    ours = Ours(plain, SETTINGS[part.setting][1], rows)
    regressor = BandRegressor(ours.band)
    centres = {  # of calibration rows
        "plain": ours.band.predict_mean(rows.calibration.x),
        "mean-variance": MeanVarianceEnsemble(members[:1]).predict(rows.calibration.x).mean,
        "ensemble": MeanVarianceEnsemble(members).predict(rows.calibration.x).mean,
        "quantiles": QuantileNetwork(quantiles, QUANTILES).predict(rows.calibration.x).mean,
    }
    noisiest = noisiest_fifth(rows, centres["plain"], ours.outputs)
    few = [n for n in FEW_ROWS if n < len(rows.calibration.y)] if part.has_few else []
    cells = []
    for n in (None, *few):
        x, y = (each[:n] for each in rows.calibration)
        boosting = ResidualNormalisedScore(GradientBoostingRegressor(random_state=split), random_state=split)
        mapie = SplitConformalRegressor(regressor, list(LEVELS), boosting, prefit=True).conformalize(x, y)
        mean, bounds = mapie.predict_interval(rows.test.x)
        found = {
            "constant": constant_width(centres["plain"][:n], y, ours.outputs),
            "boosted": Intervals(mean, bounds[:, 0], bounds[:, 1], LEVELS),
            **ours.intervals(n),
            "mean-variance": MeanVarianceEnsemble(members[:1]).calibrate(x, y).predict(rows.test.x, LEVELS),
            "ensemble": MeanVarianceEnsemble(members).calibrate(x, y).predict(rows.test.x, LEVELS),
            "quantiles": QuantileNetwork(quantiles, QUANTILES).calibrate(x, y).predict(rows.test.x, LEVELS),
        }
        covered = {name: _covered(rows.test.y, intervals) for name, intervals in found.items()}
        slabs = dict.fromkeys(found, np.full(len(LEVELS), np.nan))
        if n is None:
            shares = metrics.worst_slabs(rows.test.x, np.concatenate(list(covered.values()), axis=1), split)
            slabs = dict(zip(found, shares.reshape(-1, len(LEVELS)), strict=True))
        for name, intervals in found.items():
            own = constant_width(centres.get(name, centres["plain"])[:n], y, intervals.mean)
            by_level = {
                "coverage": covered[name].mean(axis=0),
                "width": intervals.width.mean(axis=0),
                "score": metrics.interval_score(rows.test.y, intervals),
                "own": metrics.interval_score(rows.test.y, own),
                "noisiest": covered[name][noisiest].mean(axis=0),
                "slab": slabs[name],
            }
            cells.append(
                {
                    "data": part.name,
                    "setting": part.setting,
                    "test": part.test,
                    "split": split,
                    "calibration": "all rows" if n is None else f"{n} rows",
                    "method": name,
                    "n_calibration": len(y),
                    "n_test": len(rows.test.y),
                    "rmse": float(np.sqrt(np.mean((rows.test.y - intervals.mean) ** 2))),
                }
                | {
                    f"{column}_{level:.0%}".rstrip("%"): float(value)
                    for column, values in by_level.items()
                    for level, value in zip(LEVELS, values, strict=True)
                }
            )
    return cells


def constant_width(
    centre: np.ndarray, y: np.ndarray, mean: np.ndarray, levels: tuple[float, ...] = LEVELS
) -> Intervals:
    """Split conformal with absolute residuals."""
    half = conformal_quantiles(np.sort(np.abs(y - centre)), levels)
    return Intervals(mean, mean[:, None] - half, mean[:, None] + half, levels)


def _covered(y: np.ndarray, intervals: Intervals) -> np.ndarray:  # (n, levels)
    return (intervals.lower <= y[:, None]) & (y[:, None] <= intervals.upper)


def noisiest_fifth(rows: Split, calibrated: np.ndarray, tested: np.ndarray) -> np.ndarray:
    """The test rows where residuals of the plain network are largest, as others tell; its outputs are given."""
    x = np.concatenate([rows.calibration.x, rows.test.x])
    r = np.abs(np.concatenate([rows.calibration.y - calibrated, rows.test.y - tested]))
    boosting = HistGradientBoostingRegressor(
        loss="gamma", learning_rate=0.05, max_leaf_nodes=15, min_samples_leaf=10, early_stopping=False, random_state=0
    )
    folds = KFold(5, shuffle=True, random_state=0)
    v = cross_val_predict(boosting, x, np.maximum(r, 1e-3 * r.mean()), cv=folds)[len(rows.calibration.y) :]
    return np.argsort(-v, kind="stable")[: -(-len(v) // 5)]


class Part(NamedTuple):
    """Splits of a data set whose networks are trained together: what a process does at a time."""

    name: str
    setting: str
    test: str
    splits: range

    def __str__(self) -> str:
        return f"{self.name} {self.setting} {self.test} {self.splits[0]}-{self.splits[-1]}"

    @property
    def has_few(self) -> bool:
        """Whether few calibration rows are looked at as well."""
        return self.setting == list(SETTINGS)[-1] and self.test == "random"

    def keys(self, splits: int) -> list[Key]:
        """Of the cells that are asked for."""
        return [(self.name, self.setting, self.test, split) for split in self.splits if split < splits]


def parts(options: argparse.Namespace) -> list[Part]:
    """The first splits of all data sets, the smallest first, then the shift, then the other splits."""
    settings = list(dict.fromkeys(options.settings))
    groups = [range(i, i + TOGETHER) for i in range(0, options.splits, TOGETHER)]
    names = sorted(set(options.datasets), key=data.NAMES.index)
    random = [[Part(name, setting, "random", group) for name in names for setting in settings] for group in groups]
    last = list(SETTINGS)[-1]
    shifted = [Part(name, last, "shifted", range(SHIFTED_SPLITS)) for name in names if last in settings]
    return [*random[0], *shifted, *(part for group in random[1:] for part in group)]


def rows_of(
    part: Part, report: Report, options: argparse.Namespace, done: set[Key]
) -> Iterator[list[dict[str, object]]]:
    """The cells that are not there yet."""
    warnings.simplefilter("ignore", DeltabandWarning)
    X, y = data.load(part.name, options.data)
    splits = [divided(X, y, part.test, split) for split in part.splits]
    networks = train(part, splits, options.networks, report)
    for i, split in enumerate(part.splits):
        key = (part.name, part.setting, part.test, split)
        if split < options.splits and key not in done:
            report(f"{part}: split {split}")
            yield rows_of_cell(part, split, splits[i], {name: of_kind[i] for name, of_kind in networks.items()})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = on_data("noise", __doc__, NOISE_RESULTS.name)
    parser.add_argument("--datasets", nargs="+", default=data.NAMES, choices=data.NAMES, metavar="NAME")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="NAME")
    parser.add_argument("--splits", type=positive, default=10, metavar="N", help=SPLITS_HELP)
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help=WORKERS_HELP)
    options = parser.parse_args(arguments)
    options.data = data.folder(options.data)
    rows = Rows(options.out, KEY)
    done = rows.done()
    unusable, malformed = set(), False
    for name in dict.fromkeys(options.datasets):
        try:
            data.load(name, options.data)
        except Unusable as error:
            print(f"{type(error).__name__.lower()}: {error}", file=sys.stderr)
            unusable.add(name)
            malformed |= isinstance(error, data.Malformed)
    asked = [part for part in parts(options) if part.name not in unusable]
    if not asked:
        raise Unusable("none of these data sets can be used")
    wanted = {key for part in asked for key in part.keys(options.splits)}
    todo = [part for part in asked if set(part.keys(options.splits)) - done]
    with tqdm(total=len(wanted), initial=len(wanted & done), unit="cell", mininterval=SECONDS) as bar:
        computed = partial(rows_of, options=options, done=done)
        for cell in in_processes(todo, computed, options.workers, beside(bar)):
            rows.append(cell)
            bar.update()
    if malformed:
        raise SystemExit(1)
