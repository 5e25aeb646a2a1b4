"""The installed wheel alone, with no extra at hand: `python smoke.py` in an environment that holds nothing else."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

import deltaband
from deltaband import ClassificationIntervals, ImportantDirections, PredictionIntervals, metrics, plots

EXTRAS = ("matplotlib", "pandas", "pyarrow", "typer", "skorch", "mapie")


def data(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, 2)).astype(np.float32)
    return X, (np.sin(3 * X[:, 0]) + X[:, 1] + 0.1 * rng.standard_normal(n)).astype(np.float32)


def trained(X: np.ndarray, y: np.ndarray) -> torch.nn.Module:
    """A network of one output, or for labels one of two."""
    labels = y.dtype.kind == "i"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 20), torch.nn.Tanh(), torch.nn.Linear(20, 2 if labels else 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3)
    for _ in range(400):
        optimiser.zero_grad()
        outputs, targets = model(torch.from_numpy(X)), torch.from_numpy(y)
        functional = torch.nn.functional
        loss = functional.cross_entropy(outputs, targets) if labels else functional.mse_loss(outputs[:, 0], targets)
        loss.backward()
        optimiser.step()
    return model


def regression() -> None:
    X, y = data(300, seed=0)
    model = trained(X, y)
    new_X, new_y = data(400, seed=1)
    for engine in ("auto", ImportantDirections(60)):
        band = PredictionIntervals(model, weight_decay=1e-3, engine=engine).fit(X, y, progress=False)
        share = metrics.coverage(new_y, band.predict(new_X, level=0.9))
        assert 0.8 < share < 0.97, f"{engine}: {share}"
        assert "training rows" in band.summary()
        assert (band.leverage(new_X) >= band.variance(new_X) * (1 - 1e-5)).all()
    band.fit(X, y).calibrate(*data(200, seed=2))  # with its progress bar
    share = metrics.coverage(new_y, band.predict(new_X, level=0.9))
    assert 0.8 < share < 0.97, f"calibrated: {share}"
    assert "calibrated on" in band.summary()


def classification() -> None:
    X, y = data(200, seed=3)
    labels = (y > 0).astype(np.int64)
    band = ClassificationIntervals(trained(X, labels), weight_decay=1e-2).fit(X, labels, progress=False)
    assert band.predict(X[:5]).probability.lower.shape == (5, 2)


def says_which_extra(what: str, error: str, extra: str) -> None:
    assert f"deltaband[{extra}]" in error, f"{what} should name deltaband[{extra}], but says: {error}"


def without_extras() -> None:
    installed = [name for name in EXTRAS if importlib.util.find_spec(name) is not None]
    assert not installed, f"this environment is not empty, it has {installed}"
    for module in pkgutil.walk_packages(deltaband.__path__, "deltaband."):
        if module.name.startswith("deltaband.cli."):  # main() looks for the extra before it imports them
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if "deltaband[" not in str(error):
                raise AssertionError(f"{module.name} does not say which extra it needs: {error}") from error
    intervals = deltaband.Intervals(np.zeros(3), -np.ones(3), np.ones(3), 0.9)
    for draw in (plots.band, plots.sorted_by_width):
        try:
            draw(np.arange(3.0), intervals)
        except ImportError as error:
            says_which_extra(f"plots.{draw.__name__}", str(error), "plots")
        else:
            raise AssertionError("a picture was drawn without matplotlib")
    command = subprocess.run([Path(sys.executable).with_name("deltaband")], capture_output=True, text=True, check=False)
    assert command.returncode == 1, "the command line ran without its extra"
    says_which_extra("the command line", command.stderr, "cli")


def main() -> None:
    home = Path(deltaband.__file__).parent
    assert "site-packages" in home.parts, f"{home} is not an installed package"
    assert (home / "py.typed").exists(), "py.typed is missing: type checkers would ignore the annotations"
    assert importlib.metadata.version("deltaband") == deltaband.__version__
    assert all(hasattr(deltaband, name) for name in deltaband.__all__)
    without_extras()
    warnings.simplefilter("error")
    regression()
    classification()
    print(f"deltaband {deltaband.__version__} works from its wheel, on Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
