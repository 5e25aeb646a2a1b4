"""What fits cost on a machine whose cores are busy with other work: `python -m benchmarks.load`.

Each fit runs alone, beside busy processes, as many as there are cores, and beside them without the library's limit of
BLAS threads. Wall time beside n busy processes on n cores is at least about twice that of a fit alone that uses
one core, and more for one that uses all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import deltaband.machine
from deltaband import DeltabandWarning, Exact, ImportantDirections, PredictionIntervals
from deltaband.engines import Engine

from .measure import Neighbours, _line, _table, machine
from .problem import perceptron

HERE = Path(__file__).parent
WEIGHT_DECAY = 1e-2
MOST_SLOWDOWN = 4.0
ROUNDS = 3
CASES: dict[str, tuple[int, int, Engine]] = {  # rows, features, engine
    "wine, exact": (1_399, 11, Exact()),
    "wine, ImportantDirections(200)": (1_399, 11, ImportantDirections(200)),
    "concrete, ImportantDirections(500)": (830, 8, ImportantDirections(500)),
    "protein, exact": (6_000, 9, Exact()),
}


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep cores busy while a block runs."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def seconds(rows: int, features: int, engine: Engine) -> tuple[float, float]:
    """Return the wall and the processor time of a fit."""
    torch.manual_seed(0)
    model, X = perceptron(features, 50, 50, 1), torch.randn(rows, features)
    with torch.no_grad():
        y = model(X)[:, 0] + torch.randn(rows)
    band = PredictionIntervals(model, weight_decay=WEIGHT_DECAY, engine=engine)
    wall, own = time.perf_counter(), time.process_time()
    band.fit(X, y, progress=False)
    return time.perf_counter() - wall, time.process_time() - own


def measured(case: tuple[int, int, Engine], rounds: int = ROUNDS) -> dict[str, Any]:
    """Return medians of a fit alone, beside busy processes, and beside them without the limit."""
    found: dict[str, list[tuple[float, float]]] = {"alone": [], "busy": [], "busy, no limit": []}
    seconds(*case)
    neighbours = Neighbours()
    for _ in range(rounds):
        found["alone"].append(seconds(*case))
    others = neighbours.cores()
    with busy(os.cpu_count() or 1):
        for _ in range(rounds):
            found["busy"].append(seconds(*case))
        # not in turn: threads without a limit still spin when the next fit has begun
        with patch.object(deltaband.machine, "busy_cores", lambda: 0):
            found["busy, no limit"] = [seconds(*case) for _ in range(rounds)]
    results: dict[str, Any] = {"other processes' cores": others}
    for name, times in found.items():
        results[name] = {"wall s": median(wall for wall, _ in times), "processor s": median(own for _, own in times)}
    return results


def markdown(content: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in content["machine"].items())
    header = ["fit", "alone", "busy", "slower", "busy, no limit", "slower", "processor time alone", "busy", "no limit"]
    table = _table([*header, f"≤ {MOST_SLOWDOWN:g} times slower"])
    for name, found in content["fits"].items():
        alone, beside, plain = (found[key] for key in ("alone", "busy", "busy, no limit"))
        slower = beside["wall s"] / alone["wall s"]
        cells = [name, f"{alone['wall s']:.3f} s", f"{beside['wall s']:.3f} s", f"{slower:.1f} ×"]
        cells += [f"{plain['wall s']:.3f} s", f"{plain['wall s'] / alone['wall s']:.1f} ×"]
        cells += [f"{each['processor s']:.3f} s" for each in (alone, beside, plain)]
        table.append(_line([*cells, "pass" if slower <= MOST_SLOWDOWN else "**fail**"]))
    load = max(found["other processes' cores"] or 0.0 for found in content["fits"].values())
    return (
        "# Fits on a busy machine\n\n"
        f"Medians of {ROUNDS} on {facts}. Busy: beside as many busy processes as there are cores. No limit: without "
        f"the limit of BLAS threads to free cores. While fits ran alone, others used at most {load:.2g} cores.\n\n"
        + "\n".join(table)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small fit; nothing is written unless --out is given")
    parser.add_argument("--out", type=Path, help="folder for load.json and load.md (default: benchmarks/results)")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeltabandWarning)
    folder = args.out or (None if args.quick else HERE / "results")
    cases = {"quick": (200, 5, Exact())} if args.quick else CASES
    content: dict[str, Any] = {"machine": machine(), "fits": {}}
    for name, case in cases.items():
        content["fits"][name] = measured(case, 1 if args.quick else ROUNDS)
        print(f"{name}: {json.dumps(content['fits'][name])}", flush=True)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "load.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        (folder / "load.md").write_text(markdown(content))


if __name__ == "__main__":
    main()
