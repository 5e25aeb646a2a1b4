"""Commands that make bands: demo, plan, fit."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

from ..calibration.conformal import rows_needed
from ..damping import Damping
from ..errors import warn
from ..intervals import PredictionIntervals
from ..storage import band_file as storage
from . import options
from .engines import engine, nbytes
from .errors import Refusal, Usage, listed, with_kind
from .loading import dtype, notes
from .models import network
from .pairs import Pairs, Part
from .tables import Table, open_table
from .telling import quiet, shown, tell
from .writing import check_output


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the pictures go.")] = Path("demo-output"),
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Training steps of each network.")] = 3000,
    as_json: options.Json = False,
) -> None:
    """Take a tour in a minute.

    Two networks are trained, three engines put intervals around their predictions, and two pictures are saved.

    \b
    Example:
      deltaband demo --out pictures
    """
    from .. import demo as tour

    if problem := tour.missing():
        raise Refusal(problem)
    if as_json:
        lines = [line._asdict() for line in tour.run(out, steps)]
        tell({"results": lines, "pictures": tour.pictures(out)}, "", as_json)
    else:
        tour.show(out, steps)


def plan(
    model: options.Model,
    train: options.Train,
    target: options.NoFeatures = None,
    features: options.Features = None,
    weights: options.Weights = None,
    trust: options.Trust = False,
    weight_decay: options.WeightDecay = None,
    damping: options.Damping = None,
    engine_text: options.EngineText = "auto",
    memory: options.Memory = None,
    as_json: options.Json = False,
) -> None:
    """Tell what a fit would need, before it starts.

    For each engine the memory and, roughly, the time; the arrow points to the one that a fit takes. All cells are
    looked at, but only a few rows go through the network.

    \b
    Examples:
      deltaband plan network:make --train train.csv --target price
      deltaband plan network:make --train train.csv --target price --memory 500MB --json
    """
    settings = _settings(weight_decay, damping, "mean", None, engine_text, memory)
    table = open_table(train)
    pairs, made = _prepared(table, target or [], features, model, weights, trust)
    band, (x, y), pairs = PredictionIntervals(made, **settings), pairs.first(), pairs.checked()
    # without targets any will do: only their number counts
    with quiet():
        found = band.plan([(x, y if target else np.zeros((len(x), _outputs(made, x))))], n_rows=pairs.n_rows)
    engines = [
        {
            "engine": str(option),
            "memory_bytes": option.nbytes,
            "seconds": option.seconds,
            "fits": option.nbytes <= found.memory,
            "chosen": option is found.chosen,
        }
        for option in found.options
    ]
    sizes = {"rows": pairs.n_rows, "parameters": found.problem.n_parameters, "memory_bytes": found.memory}
    tell({**sizes, "features": pairs.features, "engines": engines}, str(found), as_json)


def fit(
    model: options.Model,
    train: options.Train,
    target: options.Target,
    out: Annotated[Path, typer.Option(metavar="X.band", help="The band file to write.")],
    features: options.Features = None,
    weights: options.Weights = None,
    trust: options.Trust = False,
    weight_decay: options.WeightDecay = None,
    damping: options.Damping = None,
    loss: options.Loss = "mean",
    batch_size: options.BatchSize = None,
    target_mean: options.TargetMean = None,
    target_std: options.TargetStd = None,
    engine_text: options.EngineText = "auto",
    memory: options.Memory = None,
    calibration: options.Calibration = None,
    seed: options.Seed = 0,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Fit intervals to a trained network.

    They are fitted to its training rows and saved, together with its weights. Give what the optimiser was told,
    --weight-decay, or λ itself, --damping. With --calibration on rows that the network was not trained on neither is
    needed, and intervals cover at least as often as they say, whatever the network.

    \b
    Examples:
      deltaband fit network:make --weights w.safetensors --train train.csv --target price \\
          --weight-decay 1e-3 --out price.band
      deltaband fit network:make --weights w.pt --train train.parquet --target price \\
          --calibration held_out.parquet --out price.band
      deltaband fit exported.pt2 --trust --train train.npz --features X --target y \\
          --damping 7.2 --engine important-directions:rank=200 --out y.band
    """
    start = time.perf_counter()
    settings = _settings(weight_decay, damping, loss, batch_size, engine_text, memory)
    if weight_decay is None and damping is None and calibration is None:
        raise Usage("give --weight-decay or --damping, or --calibration, which does without them")
    part, calibration_file = _held_out(calibration, seed)
    check_output(out, force, ".band", (train, weights, calibration_file, Path(model)))
    table, other = open_table(train), None if calibration_file is None else open_table(calibration_file)
    scale = _scale(target_mean, target_std, len(table.select(target)))
    pairs, made = _prepared(table, target, features, model, weights, trust)
    pairs = replace(pairs, scale=scale, part=part)
    held = None if part is None else replace(pairs, part=replace(part, held_out=True))
    if other is not None:
        held = replace(pairs, table=other)
        other.select([*pairs.features, *pairs.targets])
    band = PredictionIntervals(made, **settings, target_transform=scale)
    held = None if held is None else replace(held.checked(), doing="calibrating")
    pairs = pairs.checked()
    with quiet():
        band.fit(pairs, n_rows=pairs.n_rows, progress=sys.stderr.isatty())
        if held is not None:
            band.calibrate(held, seed=seed)
    if held is not None and (held.n_rows or 0) < rows_needed(0.95):
        reached = f"levels up to {held.n_rows / (held.n_rows + 1):.3g}" if held.n_rows else "no level at all"
        warn(f"{held.n_rows} calibration rows serve {reached}: 0.95 takes {rows_needed(0.95)} of them")
    files = {"train": train.name} | ({} if calibration is None else {"calibration": calibration})
    size = storage.size(band, weights=True)
    if sys.stderr.isatty():
        print(f"writing {shown(str(out))}, {size / 1e6:,.4g} MB", file=sys.stderr)
    storage.save(band, out, weights=True, notes=notes(model, pairs.features, pairs.targets, **files), overwrite=force)
    found = {
        "out": out,
        "bytes": out.stat().st_size,
        "rows": band.n_rows_,
        "calibration_rows": None if held is None else held.n_rows,
        "features": pairs.features,
        "targets": pairs.targets,
        "parameters": band.n_parameters_,
        "damping": band.damping_,
        "effective_parameters": band.effective_parameters_,
        "noise_std": band.noise_std_,
        "seconds": time.perf_counter() - start,
    }
    what = f"{', '.join(pairs.targets)} from {listed(pairs.features)}"
    tell(found, f"{band.summary()}\nsaved {out}, {size / 1e6:,.4g} MB: {what}", as_json)


def _settings(
    weight_decay: float | None,
    damping: float | None,
    loss: str,
    batch_size: int | None,
    engine_text: str,
    memory: str | None,
) -> dict[str, Any]:
    """Keywords of PredictionIntervals, checked before anything is read."""
    if weight_decay is not None and damping is not None:
        raise Usage("give --weight-decay or --damping, not both: λ is what a weight decay is turned into")
    if loss not in ("mean", "half_mean", "sum"):
        raise Usage(f"--loss must be mean, half_mean or sum, got {loss!r}")
    try:
        Damping(damping, weight_decay, loss, batch_size)
    except (TypeError, ValueError) as error:
        raise Usage(str(error)) from error
    return {
        "weight_decay": weight_decay,
        "damping": damping,
        "loss": loss,
        "batch_size": batch_size,
        "engine": engine(engine_text),
        "memory": None if memory is None else nbytes(memory),
    }


def _held_out(calibration: str | None, seed: int) -> tuple[Part | None, Path | None]:
    """The rows to fit to, where some of the file are for calibration; or the file that those are in."""
    if calibration is None:
        return None, None
    try:
        fraction = float(calibration)
    except ValueError:
        return None, Path(calibration)
    if not 0 < fraction < 1:
        raise Usage(f"--calibration must be a file, or a fraction between 0 and 1, got {calibration}")
    return Part(fraction, seed, held_out=False), None


def _scale(mean: Sequence[float] | None, std: Sequence[float] | None, m: int) -> tuple[np.ndarray, np.ndarray] | None:
    if not mean and not std:
        return None
    if len(mean or []) != m or len(std or []) != m:
        raise Usage(f"--target-mean and --target-std go together, one of each for every target: {m}")
    if not (np.isfinite([*(mean or []), *(std or [])]).all() and min(std or [0]) > 0):
        raise Usage("--target-mean must be finite, --target-std positive")
    return np.array(mean), np.array(std)


def _prepared(
    table: Table, target: Sequence[str], features: Sequence[str] | None, model: str, weights: Path | None, trust: bool
) -> tuple[Pairs, nn.Module]:
    """The rows and the network, which have been seen to go together."""
    targets = table.select(target)
    chosen = table.select(features) if features else [name for name in table.names if name not in targets]
    if both := set(chosen).intersection(targets):
        raise Usage(f"column {min(both)!r} cannot be both a feature and a target")
    if not chosen:
        raise Refusal(f"{table.path} has no columns but the targets")
    made = network(model, weights, trust)
    pairs = Pairs(table, chosen, targets, dtype(made))
    m = _outputs(made, pairs.first()[0], chosen)
    if targets and m != len(targets):
        raise Refusal(f"the network returns {m} numbers a row, and there are {len(targets)} targets: {listed(targets)}")
    return pairs, made


def _outputs(model: nn.Module, x: torch.Tensor, features: Sequence[str] = ()) -> int:
    """How many numbers the network returns for a row; a refusal that names the columns where it returns none."""
    device = next((w.device for w in model.parameters()), None)
    with torch.no_grad(), quiet():
        try:
            y = model(x[:2].to(device))
        except Exception as error:
            given = f"{len(features)} features ({listed(features)})"
            raise Refusal(f"the network could not take {given}: {with_kind(error)}; --features says which") from error
    if not isinstance(y, torch.Tensor):
        raise Refusal(f"the network returns {type(y).__name__}: let the factory return one that picks the prediction")
    return y[0].numel() if y.ndim else 1  # what else is wrong with it, the library says
