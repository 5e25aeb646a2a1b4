"""One fit in one process and in two, each on one thread: strong and weak scaling, and what travels between them.

    python -m benchmarks.distributed

Strong scaling takes the same rows in two processes, weak scaling as many in each. All runs of an engine follow one
another, so that ratios are of one moment. Results go to `distributed.json` and `distributed.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deltaband

from .problem import perceptron

HERE = Path(__file__).parent / "results"
N = 20_000
SIZES = (20, 50, 50, 1)
ENGINES = ("Exact()", "RandomProjection(1000)", "Nystrom(1000)", "ImportantDirections(200)")
MOVES = ("all_reduce", "all_gather", "broadcast", "send", "recv")


def counted() -> dict[str, int]:
    """Bytes that this process gives to, or takes from, each kind of communication from now on."""
    found = dict.fromkeys(MOVES, 0)

    def counting(name: str, move: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensors: Any, *rest: Any, **options: Any) -> Any:
            found[name] += sum(t.nbytes for t in tensors) if isinstance(tensors, list) else tensors.nbytes
            return move(tensors, *rest, **options)

        return call

    for name in MOVES:
        setattr(dist, name, counting(name, getattr(dist, name)))
    return found


def work(engine: str, n: int, rank: int, size: int, folder: Path) -> None:
    """What each process does: fit to its share of n rows."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(minutes=10)
    )
    torch.manual_seed(0)
    model = perceptron(*SIZES)
    generator = torch.Generator().manual_seed(0)
    X, y = torch.randn(n, SIZES[0], generator=generator), torch.randn(n, generator=generator)
    band = deltaband.PredictionIntervals(model, damping=1.0, engine=eval(f"deltaband.{engine}"))
    band.fit(X[:2000], y[:2000], progress=False)  # whatever is slow the first time
    moved = counted()
    dist.barrier()
    start = time.perf_counter()
    band.fit(X[rank::size], y[rank::size], distributed=True, progress=False)
    seconds = time.perf_counter() - start
    assert band.n_rows_ == n
    (folder / f"{rank}.json").write_text(json.dumps({"seconds": seconds, "bytes": moved, "p": band.n_parameters_}))
    dist.barrier()
    dist.destroy_process_group()


def measured(engine: str, n: int, size: int) -> dict[str, Any]:
    """The time of the slowest process, and the bytes of all."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.distributed", "--work"]
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        arguments = [engine, str(n), str(size), folder]
        team = [
            subprocess.Popen([*command, str(rank), *arguments], env={**os.environ, **threads}) for rank in range(size)
        ]
        codes = [process.wait() for process in team]
        if any(codes):
            raise RuntimeError(f"{engine} on {size} processes has failed")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    return {
        "engine": engine,
        "n": n,
        "processes": size,
        "p": found[0]["p"],
        "seconds": max(each["seconds"] for each in found),
        "bytes": {name: sum(each["bytes"][name] for each in found) for name in MOVES},
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# One fit in two processes",
        "",
        "`python -m benchmarks.distributed`",
        "",
        f"{N:,} rows, a network of {rows[0]['p']:,} parameters, gloo on one machine, one thread a process. Efficiency",
        "is the time of one process over that of two: over twice that of two for the same rows (strong), and with as",
        "many rows in each (weak). Bytes are those that both processes give to or take from `torch.distributed`.",
        "",
        "| engine | 1 process | 2 processes, same rows | strong | 2 processes, twice the rows | weak | moved |",
        "|---|---|---|---|---|---|---|",
    ]
    for engine in ENGINES:
        one, strong, weak = (row for row in rows if row["engine"] == engine)
        moved = sum(strong["bytes"].values())
        kinds = ", ".join(f"{name} {n / 1e6:.3g}" for name, n in strong["bytes"].items() if n > 1e4)
        lines.append(
            f"| `{engine}` | {one['seconds']:.2f} s | {strong['seconds']:.2f} s | "
            f"{one['seconds'] / (2 * strong['seconds']):.2f} | {weak['seconds']:.2f} s | "
            f"{one['seconds'] / weak['seconds']:.2f} | {moved / 1e6:.3g} MB ({kinds}) |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs=5, metavar=("RANK", "ENGINE", "N", "SIZE", "FOLDER"), help="for its processes")
    asked = parser.parse_args()
    if asked.work is not None:
        rank, engine, n, size, folder = asked.work
        work(engine, int(n), int(rank), int(size), Path(folder))
        return
    rows = []
    for engine in ENGINES:
        for n, size in ((N, 1), (N, 2), (2 * N, 2)):
            rows.append(measured(engine, n, size))
            print(rows[-1], flush=True)
    (HERE / "distributed.json").write_text(json.dumps(rows, indent=1) + "\n")
    (HERE / "distributed.md").write_text(markdown(rows))


if __name__ == "__main__":
    main()
