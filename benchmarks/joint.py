"""Joint covariances against laplace-torch 0.3, and CRPS against crepes: `python -m benchmarks.joint`.

Both get one trained network, as in `benchmarks.laplace`, with fewer rows and in float64. laplace-torch's full posterior
of all weights, asked with `joint=True` in an environment of its own, is compared entry by entry with
`band.covariance(x, by="leverage")`; with σ = 1 there it is s² times as large here. crepes gets the residuals of the
calibration rows and σ(x) of the band, and both distributions of the new rows get their CRPS by the same integral.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from deltaband import DeltabandWarning, Exact, PredictionIntervals, metrics

from .laplace import HERE, python, trained
from .measure import Report, Result, environment, gflops
from .problem import Problem
from .workload import Size

SIZE = Size(n=2_000, features=8, new_rows=1_000)
QUICK = Size(n=300, features=5, hidden=8, new_rows=200)
JOINT_ROWS, CALIBRATION_ROWS = 60, 500


def in_float64(size: Size) -> Problem:
    problem = trained(size)
    arrays = {name: getattr(problem, name).double() for name in ("X", "y", "new")}
    return replace(problem, model=problem.model.double(), **arrays)


def theirs(problem: Problem) -> np.ndarray:
    """The covariance of all new rows by laplace-torch."""
    with tempfile.TemporaryDirectory() as temporary:
        path, answer = Path(temporary) / "problem.npz", Path(temporary) / "answer.npz"
        problem.save(path)
        options = ["full", "--repeats", "1", "--threads", "1", "--joint"]
        command = [str(python()), "-m", "benchmarks.laplace_worker", str(path), str(answer), *options]
        child = subprocess.run(command, cwd=HERE.parent, env=environment(1), capture_output=True, text=True)
        if child.returncode:
            raise RuntimeError(child.stderr)
        with np.load(answer) as file:
            return file["covariance"].reshape(len(problem.new), len(problem.new))


def difference(problem: Problem, their: np.ndarray) -> Result:
    """The largest difference between two entries, in units of the geometric mean of their variances."""
    band = PredictionIntervals(problem.model, damping=problem.damping, engine=Exact())
    band.fit(problem.X, problem.y, progress=False)
    ours = band.covariance(problem.new, by="leverage").numpy() / band.noise_std_**2
    sd = np.sqrt(ours.diagonal())
    off = np.abs(ours - their) / np.outer(sd, sd)
    claim = "largest difference of laplace-torch's joint functional covariance to band.covariance(x), as correlations"
    about = {"rows": len(ours), "parameters": band.n_parameters_, "mean": float(off.mean())}
    return Result(claim, float(off.max()), at_most=1e-6, unit="", details=about)


def scores(problem: Problem, y_new: np.ndarray) -> dict[str, Result]:
    """The mean CRPS on new rows, calibrated on some of the rows and fitted to the others."""
    from crepes import ConformalPredictiveSystem

    x, y = problem.X[-CALIBRATION_ROWS:], problem.y[-CALIBRATION_ROWS:]
    found = {}
    for tune in (False, True):
        band = PredictionIntervals(problem.model, damping=problem.damping, engine=Exact())
        band.fit(problem.X[:-CALIBRATION_ROWS], problem.y[:-CALIBRATION_ROWS], progress=False)
        band.calibrate(x, y, tune=tune)
        mean, sigma = (each.numpy() for each in band.predict_mean_and_scale(x))
        new_mean, new_sigma = (each.numpy() for each in band.predict_mean_and_scale(problem.new))
        system = ConformalPredictiveSystem().fit(y.numpy() - mean, sigmas=sigma)
        their = metrics.crps(y_new, system.predict_cpds(new_mean, sigmas=new_sigma))
        our = {
            "symmetric=False": band.score(problem.new, y_new, symmetric=False),
            "symmetric=True": band.score(problem.new, y_new),
        }
        name = "tuned" if tune else "untuned"
        about = {"crepes": their, **our, "rows": len(y_new)}
        claim = f"CRPS of band.score(x, y, symmetric=False) / that of crepes on the same scale, tune={tune}"
        found[f"crps_{name}"] = Result(claim, our["symmetric=False"] / their, at_most=1.01, details=about)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing is written unless --out is given")
    parser.add_argument("--out", type=Path, help="folder for joint.json and joint.md (default: benchmarks/results)")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeltabandWarning)
    threads = torch.get_num_threads()
    folder = args.out or (None if args.quick else HERE / "results")
    report = Report(folder, "joint", "Joint covariances and laplace-torch 0.3, distributions and crepes", keep=False)
    report.gflops[str(threads)] = {t: gflops(getattr(torch, t)) for t in ("float32", "float64")}
    problem = in_float64(QUICK if args.quick else SIZE)
    few = replace(problem, new=problem.new[:JOINT_ROWS])
    report.add("difference_joint", threads, difference(few, theirs(few)))
    for name, result in scores(problem, targets(problem)).items():
        report.add(name, threads, result)


def targets(problem: Problem) -> np.ndarray:
    """Observations at the new rows, drawn anew as those of `trained` were."""
    U = problem.new / 12**0.5 + 0.5
    f = 10 * (torch.pi * U[:, 0] * U[:, 1]).sin() + 20 * (U[:, 2] - 0.5) ** 2 + 10 * U[:, 3] + 5 * U[:, 4]
    noise = torch.randn(len(U), generator=torch.Generator().manual_seed(1), dtype=U.dtype)
    return ((f + noise - 14.4) / 5).numpy()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
