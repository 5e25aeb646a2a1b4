"""What one `predict` costs above the work that nobody can do without: `python -m benchmarks.latency --label after`.

For networks of about 1,000, 1 million and 10 million parameters, for each form of the covariance and for batches of
several sizes, `predict` is timed in turn with a plain forward and backward pass of the same rows, and with the bare
work: the gradients and the solve, written down for this network alone, without any check. All numbers are medians, on
one thread, of the process's own time: other work on the machine, which shows in `wall ms`, hardly changes them.

A second table has networks of four families and more engines: rows per second of `predict` in batches of 1,024, beside
a plain forward pass of the same rows and a forward and backward pass; `--families` measures that one alone. A third
has the programs of `export` beside a plain forward pass; `--export` measures that one alone.

Runs with different labels share the first table. An older version of the library is measured with its `src` folder on
PYTHONPATH: `PYTHONPATH=../older/src python -m benchmarks.latency --label before`.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import scipy.linalg
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from deltaband import DeltabandWarning, Exact, ImportantDirections, Nystrom, PredictionIntervals, RandomProjection
from deltaband.engines import Engine

from .families import FAMILIES
from .measure import Neighbours, _line, _table, limited_to, machine
from .problem import perceptron

HERE = Path(__file__).parent
WEIGHT_DECAY = 1e-2
PROJECTED_DIM = 256
SECONDS_PER_CASE = 6.0
LOAD = "other processes' cores"
MOST_ROUNDS, FEWEST_ROUNDS = 200, 5
MOST_OVERHEAD_MS, MOST_RATIO = 1.5, 1.3  # goals: of one row of the tiny network, of one row of the largest
MOST_EXACT_RATIO = 1.5  # of exact forms for more rows


@dataclass(frozen=True)
class Case:
    """A network, a form of the covariance, and how many rows it is fitted to."""

    network: str
    form: str
    n_rows: int
    batches: tuple[int, ...] = (1, 32, 1024)


WIDTHS = {"tiny": (10, 25, 25, 1), "1M": (100, 950, 950, 1), "10M": (100, 3100, 3100, 1)}
CASES = [
    Case("tiny", "primal", 2000),
    Case("tiny", "dual", 500),
    Case("tiny", "projection", 500),
    Case("1M", "dual", 500),
    Case("1M", "projection", 500),
    Case("10M", "dual", 500),
    Case("10M", "projection", 500),
]
QUICK_CASES = [Case("tiny", form, n, (1, 3)) for form, n in (("primal", 1000), ("dual", 50), ("projection", 50))]


SERVED = {"MLP": "perceptron", "conv net": "convolutions", "transformer": "transformer", "LSTM": "LSTM"}
SERVING_ENGINES: dict[str, Engine] = {
    "Exact()": Exact(),
    "RandomProjection(256)": RandomProjection(PROJECTED_DIM),
    "Nystrom(256)": Nystrom(256),
    "ImportantDirections(100)": ImportantDirections(100),
}
FITTED_ROWS, SERVED_ROWS = 1000, 1024
COMPRESSED_TO = 0.05
MOST_PASSES = 3.0  # goal: of a projection, in forward and backward passes
EXPORTED_ROWS = (1, 256)
MOST_FORWARDS = 3.0  # goal: of an exported projection for more rows, in forward passes


class Bare:
    """The gradients of a perceptron and their variances, without any check."""

    def __init__(self, model: nn.Sequential, X: Tensor) -> None:
        self.model = model
        self.layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        self.parameters = dict(model.named_parameters())
        self.p = sum(w.numel() for w in self.parameters.values())
        self.damping = len(X) * WEIGHT_DECAY / 2
        constants = {name: w.detach() for name, w in self.parameters.items()}
        by_row = vmap(grad(lambda w, row: functional_call(model, w, (row[None],)).sum()), in_dims=(None, 0))
        self._by_row = lambda x: torch.cat([g.flatten(1) for g in by_row(constants, x).values()], dim=1)

    def rows(self, x: Tensor) -> Tensor:  # (b, p)
        if len(x) > 1:
            return self._by_row(x)
        gradients = torch.autograd.grad(self.model(x).sum(), list(self.parameters.values()))
        return torch.cat([g.flatten() for g in gradients])[None]

    def factors(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What each layer was given, and the gradient of what it returned: (b, a) and (b, o)."""
        given, returned = [], []
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                given.append(x.detach().double())
                x = layer(x)
                returned.append(x)
            else:
                x = layer(x)
        deltas = torch.autograd.grad(x.sum(), returned)
        return [(a, d.double()) for a, d in zip(given, deltas, strict=True)]

    def primal(self, X: Tensor) -> Callable[[Tensor], object]:
        J = self._by_row(X).double()
        factor = scipy.linalg.cholesky((J.T @ J + self.damping * torch.eye(self.p)).numpy(), lower=True)

        def variance(x: Tensor) -> np.ndarray:
            z = scipy.linalg.solve_triangular(factor, self.rows(x).double().numpy().T, lower=True, check_finite=False)
            u = scipy.linalg.solve_triangular(factor, z, lower=True, trans="T", check_finite=False)
            return (z * z).sum(axis=0) - self.damping * (u * u).sum(axis=0)

        return variance

    def dual(self, X: Tensor) -> Callable[[Tensor], object]:
        known = self.factors(X)

        def inner(mine: list[tuple[Tensor, Tensor]]) -> np.ndarray:  # (n, b)
            pairs = zip(known, mine, strict=True)
            return torch.stack([(A @ a.T + 1) * (D @ d.T) for (A, D), (a, d) in pairs]).sum(dim=0).numpy()

        factor = scipy.linalg.cholesky(inner(known) + self.damping * np.eye(len(X)), lower=True)

        def variance(x: Tensor) -> np.ndarray:
            c = scipy.linalg.cho_solve((factor, True), inner(self.factors(x)), check_finite=False)
            return (c * c).sum(axis=0)

        return variance

    def projection(self, X: Tensor) -> Callable[[Tensor], object]:
        rng, r = np.random.default_rng(0), PROJECTED_DIM
        basis = np.linalg.qr(rng.normal(size=(r, r)))[0]
        hashes = {}

        def hashed(which: tuple[int, str], values: Tensor) -> Tensor:  # (b, ·) -> (b, r)
            size = values.shape[1]
            if which not in hashes:
                at, signs = rng.integers(r, size=(2, size)), rng.choice([-1.0, 1.0], size=(2, size))
                hashes[which] = torch.from_numpy(at), torch.from_numpy(signs)
            total = torch.zeros(len(values), r, dtype=torch.float64)
            for at, signs in zip(*hashes[which], strict=True):
                total.index_add_(1, at, values * signs)
            return total

        def variance(x: Tensor) -> np.ndarray:
            projected, frequencies = (
                torch.zeros(len(x), r, dtype=torch.float64),
                torch.zeros((), dtype=torch.complex128),
            )
            for i, (a, d) in enumerate(self.factors(x)):
                projected += hashed((i, "bias"), d)
                if d.shape[1] == 1:
                    projected += hashed((i, "vector"), a * d)
                else:
                    frequencies = frequencies + torch.fft.rfft(hashed((i, "a"), a)) * torch.fft.rfft(
                        hashed((i, "d"), d)
                    )
            projected += torch.fft.irfft(frequencies, n=r)
            return ((projected.numpy() @ basis) ** 2).sum(axis=1)

        return variance


def fitted(model: nn.Module, case: Case, X: Tensor, y: Tensor) -> PredictionIntervals:
    engine = RandomProjection(PROJECTED_DIM) if case.form == "projection" else Exact()
    name = "engine" if "engine" in inspect.signature(PredictionIntervals).parameters else "covariance"  # an older one
    band = PredictionIntervals(model, weight_decay=WEIGHT_DECAY, **{name: engine})
    return band.fit(X, y, progress=False)


def made(case: Case) -> tuple[nn.Sequential, Tensor, PredictionIntervals]:
    """The network, the rows and the band of a case."""
    torch.manual_seed(0)
    model = perceptron(*WIDTHS[case.network])
    X = torch.randn(case.n_rows, WIDTHS[case.network][0])
    with torch.no_grad():
        y = model(X)[:, 0] + torch.randn(len(X))
    return model, X, fitted(model, case, X, y)


def exported(network: str, n: int = 500, seconds: float = SECONDS_PER_CASE) -> dict[str, dict[str, float]]:
    """Milliseconds of the process's own time, of a forward pass and of the program of a projection, by rows."""
    model, X, band = made(Case(network, "projection", n))
    with tempfile.TemporaryDirectory() as folder:
        band.export(Path(folder) / "band.pt2")
        program = torch.export.load(Path(folder) / "band.pt2").module()
    found = {}
    for rows in EXPORTED_ROWS:
        x = torch.randn(rows, X.shape[1])
        runners = {"forward": lambda x=x: model(x), "program": lambda x=x: program(x)}
        with torch.no_grad():
            times = _medians([*runners.values(), lambda x=x: band.predict(x)], seconds / len(EXPORTED_ROWS))
        names = [*runners, "predict"]
        found[f"{network}, {rows} row{'s'[: rows > 1]}"] = {
            name: own for name, (own, _) in zip(names, times, strict=True)
        }
    return found


def measured(case: Case, seconds: float = SECONDS_PER_CASE) -> dict[str, dict[str, Any]]:
    """Medians in milliseconds, by the name of the measurement."""
    model, X, band = made(case)
    variance = getattr(Bare(model, X), case.form)(X)
    results = {}
    for rows in case.batches:
        x = torch.randn(rows, X.shape[1])

        def forward_and_backward(x: Tensor = x) -> None:
            torch.autograd.grad(model(x).sum(), list(model.parameters()))

        runners = [lambda x=x: band.predict(x), forward_and_backward, lambda x=x: variance(x)]
        neighbours = Neighbours()
        (predict, wall), (plain, _), (bare, _) = _medians(runners, seconds / len(case.batches))
        results[f"{case.network}, {case.form}, {rows} row{'s'[: rows > 1]}"] = {
            "predict ms": predict,
            "forward and backward ms": plain,
            "bare gradients and solve ms": bare,
            "wall ms": wall,
            LOAD: neighbours.cores(),
        }
    return results


def served(
    family: str, rows: int = SERVED_ROWS, n: int = FITTED_ROWS, seconds: float = SECONDS_PER_CASE
) -> dict[str, float]:
    """Rows per second of the process's own time, of plain passes and of `predict` by engine; none for what is not."""
    torch.manual_seed(0)
    made = FAMILIES[SERVED[family]]
    model, X, new = made.model().eval(), made.inputs(n), made.inputs(rows)
    with torch.no_grad():
        y = model(X)[:, 0]
    y = y + y.std() * torch.randn(n)
    bands = {
        name: PredictionIntervals(model, weight_decay=WEIGHT_DECAY, engine=engine).fit(X, y, progress=False)
        for name, engine in SERVING_ENGINES.items()
    }
    with contextlib.suppress(ValueError):  # within so many dimensions it is not so exact
        bands[f"compress({COMPRESSED_TO})"] = bands["Exact()"].compress(tolerance=COMPRESSED_TO, x=new)
    weights = [w for w in model.parameters() if w.requires_grad]

    def forward() -> None:
        with torch.no_grad():
            model(new)

    def forward_and_backward() -> None:
        torch.autograd.grad(model(new).sum(), weights)

    runners = {"forward": forward, "forward and backward": forward_and_backward}
    runners |= {name: lambda band=band: band.predict(new) for name, band in bands.items()}
    times = _medians(list(runners.values()), seconds)
    return {name: 1e3 * rows / own for name, (own, _) in zip(runners, times, strict=True)}


def _medians(runners: list[Callable[[], object]], seconds: float) -> list[tuple[float, float]]:
    """Milliseconds of the process and of the wall, of each, taken in turn."""
    for run in runners:
        run()
    taken: list[list[tuple[float, float]]] = [[] for _ in runners]
    end = time.perf_counter() + seconds
    while len(taken[0]) < FEWEST_ROUNDS or (len(taken[0]) < MOST_ROUNDS and time.perf_counter() < end):
        for run, times in zip(runners, taken, strict=True):
            own, wall = time.process_time(), time.perf_counter()
            run()
            times.append((1e3 * (time.process_time() - own), 1e3 * (time.perf_counter() - wall)))
    return [(median(own for own, _ in times), median(wall for _, wall in times)) for times in taken]


def goal(name: str, result: dict[str, Any]) -> str:
    """Whether one row is answered fast enough, where there is a goal for it."""
    predict, bare = result["predict ms"], result["bare gradients and solve ms"]
    if name.startswith("tiny") and name.endswith("1 row"):
        return f"≤ {MOST_OVERHEAD_MS} ms above: {'pass' if predict - bare <= MOST_OVERHEAD_MS else '**fail**'}"
    if name.startswith("10M") and name.endswith("1 row"):
        return f"≤ {MOST_RATIO} ×: {'pass' if predict <= MOST_RATIO * bare else '**fail**'}"
    if name.endswith("rows") and "projection" in name:
        passes = predict / result["forward and backward ms"]
        return f"≤ {MOST_PASSES:g} passes: {passes:.1f}, {'pass' if passes <= MOST_PASSES else '**fail**'}"
    if name.endswith("rows"):
        return f"≤ {MOST_EXACT_RATIO} ×: {'pass' if predict <= MOST_EXACT_RATIO * bare else '**fail**'}"
    return "–"


def markdown(content: dict[str, Any]) -> str:
    runs = content["runs"]
    labels = sorted(runs, key=lambda label: (label != "before", label))
    facts = ", ".join(f"{name} {value}" for name, value in content["machine"].items())
    header = [f"{label}: {what}" for label in labels for what in ("predict", "bare", "above bare", "ratio")]
    table = _table(["network, form, batch", "forward + backward", *header, "goal for the last"])
    for name in dict.fromkeys(name for run in runs.values() for name in run):
        found = [runs[label].get(name) for label in labels]
        last = next(result for result in reversed(found) if result is not None)
        cells = [name, f"{last['forward and backward ms']:.3g} ms"]
        for result in found:
            if result is None:
                cells += [""] * 4
                continue
            predict, bare = result["predict ms"], result["bare gradients and solve ms"]
            cells += [f"{predict:.3g} ms", f"{bare:.3g} ms", f"{predict - bare:.3g} ms", f"{predict / bare:.2f} ×"]
        table.append(_line([*cells, goal(name, last)]))
    load = ", ".join(f"{label} {np.mean([r[LOAD] or 0 for r in runs[label].values()]):.2g}" for label in labels)
    return (
        "# Latency of `predict`\n\n"
        f"Medians on {facts}. Other work shared the machine (cores used on average: {load}), so that these are times "
        "of the process itself, not of the wall.\n\n"
        "Bare: gradients and solve for this network alone, without any check. `projection` includes the random "
        f"projection of each gradient to {PROJECTED_DIM} numbers.\n\n"
        + "\n".join(table)
        + "\n"
        + ("\n" + families_table(content["families"]) if content.get("families") else "")
        + ("\n" + export_table(content["export"]) if content.get("export") else "")
    )


def families_table(families: dict[str, dict[str, float]]) -> str:
    names = list(dict.fromkeys(name for found in families.values() for name in found))
    table = _table(["rows per second", *families])
    for name in names:
        cells = []
        for found in families.values():
            if name not in found:
                cells.append("–")
                continue
            passes = found["forward and backward"] / found[name]
            cell = f"{found[name]:,.0f} ({passes:.1f} passes)"
            cells.append(f"**{cell}**" if name.startswith("RandomProjection") and passes > MOST_PASSES else cell)
        table.append(_line([name, *cells]))
    return (
        f"## Families of networks\n\nIn batches of {SERVED_ROWS:,} rows, fitted to {FITTED_ROWS:,}; in brackets the "
        f"time in forward and backward passes, of which a projection should take at most {MOST_PASSES:g}. `compress` "
        "is of the exact fit; – where it would take more dimensions than there are parameters.\n\n"
        + "\n".join(table)
        + "\n"
    )


def export_table(programs: dict[str, dict[str, float]]) -> str:
    table = _table(["network, batch", "forward", "program", "ratio", "predict", "goal"])
    for name, found in programs.items():
        ratio = found["program"] / found["forward"]
        verdict = f"≤ {MOST_FORWARDS:g} ×: {'pass' if ratio <= MOST_FORWARDS else '**fail**'}"
        times = [f"{found['forward']:.3g} ms", f"{found['program']:.3g} ms", f"{ratio:.2f} ×"]
        cells = [name, *times, f"{found['predict']:.3g} ms", verdict if name.endswith("rows") else "–"]
        table.append(_line(cells))
    return (
        f"## Exported programs\n\n`band.export` of a projection to {PROJECTED_DIM} dimensions, run by torch, beside a "
        "plain forward pass of the same rows and `predict`.\n\n" + "\n".join(table) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--label", default="after", help="the column of the table, such as before or after")
    parser.add_argument("--only", nargs="+", default=list(WIDTHS), choices=WIDTHS, metavar="NETWORK")
    parser.add_argument("--families", action="store_true", help="the second table alone")
    parser.add_argument("--export", action="store_true", help="the third table alone, of the networks of --only")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing is written unless --out is given")
    parser.add_argument("--out", type=Path, help="folder for latency.json and latency.md (default: benchmarks/results)")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeltabandWarning)
    folder = args.out or (None if args.quick else HERE / "results")
    content: dict[str, Any] = {"machine": machine() | {"threads": 1}, "runs": {}, "families": {}, "export": {}}
    if folder is not None and (folder / "latency.json").exists():
        content |= {k: v for k, v in json.loads((folder / "latency.json").read_text()).items() if k != "machine"}
    run, seconds = content["runs"].setdefault(args.label, {}), 0.3 if args.quick else SECONDS_PER_CASE

    def write() -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "latency.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            (folder / "latency.md").write_text(markdown(content))

    with limited_to(1):
        for case in [] if args.families or args.export else QUICK_CASES if args.quick else CASES:
            if case.network not in args.only:
                continue
            for name, result in measured(case, seconds).items():
                print(f"{name}: {json.dumps(result, ensure_ascii=False)} {goal(name, result)}", flush=True)
                run[name] = result
            write()
        for family in [] if args.export else SERVED:
            size = (20, 60) if args.quick else (SERVED_ROWS, FITTED_ROWS)
            content["families"][family] = found = served(family, *size, seconds)
            print(f"{family}: {json.dumps(found)}", flush=True)
            write()
        for network in [] if args.families else ["tiny"] if args.quick else args.only:
            content["export"] |= exported(network, 50 if args.quick else 500, seconds)
            print(json.dumps(content["export"]), flush=True)
            write()


if __name__ == "__main__":
    main()
