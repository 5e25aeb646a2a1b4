"""The time that a plan expects of a fit, and the time that the fit takes: `python -m benchmarks.plan`.

Twenty fits: five networks, with engines of several kinds and sizes. Both times are of one process and one run; the plan
is made just before the fit. What else runs on the machine between the two is noise in the ratio.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deltaband import (
    DeltabandWarning,
    Exact,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
)
from deltaband.engines import Engine

from .measure import Neighbours, _line, _table, machine
from .problem import perceptron

HERE = Path(__file__).parent
FACTOR = 2.0  # that a plan may be off
LEAST_SECONDS = 0.2  # of a fit; what is shorter is overhead, and its plan is of no use

Made = tuple[nn.Module, Tensor]


def _convolutional(n: int) -> Made:
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(32 * 7 * 7, 1)), torch.randn(n, 3, 16, 16)


def _perceptron(n: int, *widths: int) -> Made:
    return perceptron(*widths, 1), torch.randn(n, widths[0])


NETWORKS: dict[str, Callable[[], Made]] = {
    "[50, 50], n = 12,000": lambda: _perceptron(12_000, 9, 50, 50),
    "[50, 50], n = 2,000": lambda: _perceptron(2_000, 9, 50, 50),
    "[256, 256], n = 1,500": lambda: _perceptron(1_500, 20, 256, 256),
    "[950, 950], n = 1,000": lambda: _perceptron(1_000, 100, 950, 950),
    "convolutional, n = 1,000": lambda: _convolutional(1_000),
}
ENGINES: tuple[Engine, ...] = (Exact(), RandomProjection(512), Nystrom(512), ImportantDirections(200))
SMALLER = RobustFrequentDirections(30)  # a sketch of rank 200 of a million parameters would be 3 GB


def measured(make: Callable[[], Made], engine: Engine) -> dict[str, Any]:
    """Return the seconds that were planned, and those that the fit took."""
    torch.manual_seed(0)
    model, X = make()
    y = torch.randn(len(X))
    band = PredictionIntervals(model.eval(), weight_decay=1e-2, engine=engine, memory=8e9)
    neighbours = Neighbours()
    chosen = band.plan(X, y).chosen
    assert chosen is not None
    start = time.perf_counter()
    band.fit(X, y, progress=False)
    took = time.perf_counter() - start
    return {"planned s": chosen.seconds, "took s": took, "other processes' cores": neighbours.cores()}


def cases() -> Iterator[tuple[str, Callable[[], Made], Engine]]:
    for name, make in NETWORKS.items():
        for engine in ENGINES:
            is_large = name.startswith("[950") and isinstance(engine, ImportantDirections)
            yield name, make, SMALLER if is_large else engine


def is_within(found: dict[str, Any]) -> bool | None:
    """Return whether the plan was within the factor; None for a fit that was too short to judge."""
    if max(found["planned s"], found["took s"]) < LEAST_SECONDS:
        return None
    return 1 / FACTOR <= found["planned s"] / found["took s"] <= FACTOR


def markdown(content: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in content["machine"].items())
    table, verdicts = _table(["fit", "planned", "took", "planned / took", f"within {FACTOR:g} ×"]), []
    for name, found in content["fits"].items():
        verdicts.append(is_within(found))
        said = "too short" if verdicts[-1] is None else "yes" if verdicts[-1] else "**no**"
        cells = [
            f"{found['planned s']:.2f} s",
            f"{found['took s']:.2f} s",
            f"{found['planned s'] / found['took s']:.2f}",
        ]
        table.append(_line([name, *cells, said]))
    judged = [each for each in verdicts if each is not None]
    load = max((found["other processes' cores"] or 0.0 for found in content["fits"].values()), default=0.0)
    return (
        f"# Plans and fits\n\nOn {facts}. {sum(judged)} of {len(judged)} plans are within a factor of {FACTOR:g}; fits "
        f"of less than {LEAST_SECONDS:g} s are not judged. Other processes used up to {load:.2g} cores meanwhile.\n\n"
        + "\n".join(table)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for plan.json and plan.md")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeltabandWarning)
    content: dict[str, Any] = {"machine": machine(), "fits": {}}
    if (args.out / "plan.json").exists():  # `--only` renews some rows
        content["fits"] = json.loads((args.out / "plan.json").read_text())["fits"]
    measured(lambda: _perceptron(200, 4, 10), ImportantDirections(20))  # whatever is loaded on first use is loaded now
    args.out.mkdir(parents=True, exist_ok=True)
    for name, make, engine in cases():
        if name not in args.only:
            continue
        content["fits"][f"{name}, {engine!r}"] = found = measured(make, engine)
        print(f"{name}, {engine!r}: {json.dumps(found)}", flush=True)
        (args.out / "plan.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        (args.out / "plan.md").write_text(markdown(content))


if __name__ == "__main__":
    main()
