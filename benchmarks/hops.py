"""Count the files and functions of the package that a call passes through: `python -m benchmarks.hops`.

With `--write` the table goes into CONTRIBUTING.md, with `--files` the names of the files are printed as well.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import deltaband
from deltaband import ImportantDirections, PredictionIntervals
from deltaband.cli import main as command_line

PACKAGE = Path(deltaband.__file__).parent
CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"
BEGIN, END = "<!-- hops -->", "<!-- /hops -->"
FIT_FILES, SKETCH_FILES, PREDICT_FILES = 20, 25, 12  # at most
ROWS, FEW_ROWS, FEATURES, HIDDEN = 200, 30, 3, 8  # 41 parameters: more than the few rows, fewer than the rows
RANK = 38  # of the sketch
WEIGHT_DECAY = 0.3  # high enough for the few rows: no call warns
INLINED = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # not functions of their own in every Python

NETWORK = f"""
from torch import nn

def make():
    return nn.Sequential(nn.Linear({FEATURES}, {HIDDEN}), nn.Tanh(), nn.Linear({HIDDEN}, 1))
"""


@dataclass(frozen=True)
class Hops:
    """What one call passed through."""

    files: tuple[str, ...]
    functions: int


def count(call: Callable[[], object]) -> Hops:
    """Return the files and the number of functions of the package that run during a call, in this thread."""
    seen: set[CodeType] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    ours = {code for code in seen if Path(code.co_filename).is_relative_to(PACKAGE) and code.co_name not in INLINED}
    files = {Path(code.co_filename).relative_to(PACKAGE).as_posix() for code in ours}
    return Hops(tuple(sorted(files)), len(ours))


# --- the calls: each is prepared, then counted


def model() -> nn.Sequential:
    """A network that has been trained, if not long: of another there would be a warning."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    optimiser, (X, y) = torch.optim.Adam(made.parameters(), lr=3e-2), data(ROWS)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.mse_loss(made(X), y).backward()
        optimiser.step()
    return made


def data(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, FEATURES, generator=generator)
    return X, X.sum(dim=1, keepdim=True) + 0.1 * torch.randn(rows, 1, generator=generator)


def fit(rows: int, **options: Any) -> Callable[[], PredictionIntervals]:
    band = PredictionIntervals(model(), weight_decay=WEIGHT_DECAY, **options)
    loader = DataLoader(TensorDataset(*data(rows)), batch_size=32)
    return lambda: band.fit(loader, progress=False)


def predict(rows: int) -> Callable[[], object]:
    band = fit(rows)()
    row = data(1, seed=1)[0]
    return lambda: band.predict(row)


def calibrate() -> Callable[[], object]:
    band = fit(ROWS)()
    rows = data(ROWS, seed=2)
    return lambda: band.calibrate(*rows)


def command() -> Callable[[], object]:
    """`deltaband fit` with a network, its weights and a table in a folder of their own."""

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder, _working_in(folder), _quiet() as printed:
            Path("hops_network.py").write_text(NETWORK)
            torch.save(model().state_dict(), "weights.pt")
            table = np.hstack([each.numpy() for each in data(ROWS)])
            names = ",".join([*(f"x{i}" for i in range(FEATURES)), "y"])
            np.savetxt("train.csv", table, delimiter=",", header=names, comments="")
            files = ["--weights", "weights.pt", "--train", "train.csv", "--out", "y.band"]
            code = command_line(
                ["fit", "hops_network:make", *files, "--target", "y", "--weight-decay", str(WEIGHT_DECAY)]
            )
            if code:
                raise RuntimeError(f"deltaband fit ended with {code}: {printed.getvalue()}")

    return run


@contextlib.contextmanager
def _working_in(folder: str) -> Iterator[None]:
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        sys.modules.pop("hops_network", None)


@contextlib.contextmanager
def _quiet() -> Iterator[io.StringIO]:
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        yield printed


@dataclass(frozen=True)
class Operation:
    prepare: Callable[[], Callable[[], object]]
    most_files: int | None = None


OPERATIONS = {
    "`fit` of a `DataLoader`, exact, n > p": Operation(lambda: fit(ROWS), FIT_FILES),
    "`fit` of a `DataLoader`, exact, n < p": Operation(lambda: fit(FEW_ROWS), FIT_FILES),
    "`fit` of a `DataLoader`, sketch": Operation(lambda: fit(ROWS, engine=ImportantDirections(RANK)), SKETCH_FILES),
    "`predict` of one row, n > p": Operation(lambda: predict(ROWS), PREDICT_FILES),
    "`predict` of one row, n < p": Operation(lambda: predict(FEW_ROWS), PREDICT_FILES),
    "`calibrate`": Operation(calibrate),
    "`deltaband fit`": Operation(command),
}


def measure(operation: Operation) -> Hops:
    """Count the second of two calls, each on an object of its own: the first imports what is imported late."""
    operation.prepare()()
    return count(operation.prepare())


def table(hops: dict[str, Hops]) -> str:
    """Return the counts as a Markdown table."""
    lines = ["| call | files | at most | functions |", "|---|---|---|---|"]
    for name, each in hops.items():
        most = OPERATIONS[name].most_files
        lines.append(f"| {name} | {len(each.files)} | {'–' if most is None else most} | {each.functions} |")
    return "\n".join(lines)


def write(text: str, document: Path = CONTRIBUTING) -> None:
    """Replace what stands between the two markers of a document."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", flags=re.DOTALL)
    changed, places = pattern.subn(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", document.read_text(encoding="utf-8"))
    if places != 1:
        raise ValueError(f"{document.name} must hold {BEGIN} … {END} once, but does {places} times")
    document.write_text(changed, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hops", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into CONTRIBUTING.md")
    parser.add_argument("--files", action="store_true", help="print the names of the files as well")
    options = parser.parse_args()
    hops = {name: measure(operation) for name, operation in OPERATIONS.items()}
    print(table(hops))
    if options.files:
        for name, each in hops.items():
            print(f"\n{name}: {', '.join(each.files)}")
    if options.write:
        write(table(hops))


if __name__ == "__main__":
    main()
