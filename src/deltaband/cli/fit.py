"""Commands that read training rows: plan, fit."""

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor, nn

from .. import storage
from ..calibration import rows_needed
from ..errors import warn
from ..intervals import PredictionIntervals
from . import options
from .models import load_network, network_dtype
from .output import Refusal, Usage, join_names, print_result, strip_control_characters, with_type
from .tables import StoredRows, Table, check_output, open_table, store_rows

MAX_BYTES_IN_MEMORY = 2**27  # stored rows that take more go to a temporary file


def plan(
    model: options.Model,
    train: options.Train,
    target: options.OptionalTarget = None,
    features: options.Features = None,
    weights: options.Weights = None,
    trust: options.Trust = False,
    weight_decay: options.WeightDecay = None,
    damping: options.Damping = None,
    engine_text: options.EngineText = "auto",
    memory: options.Memory = None,
    as_json: options.Json = False,
) -> None:
    """Show what a fit would need, before it starts.

    For each engine the memory and, roughly, the time; the arrow points to the one that a fit uses. All cells are
    checked, but only a few rows go through the network.

    \b
    Examples:
      deltaband plan network:make --train train.csv --target price
      deltaband plan network:make --train train.csv --target price --memory 500MB --json
    """
    settings = _check_settings(engine_text, memory, weight_decay=weight_decay, damping=damping)
    rows = _open_training_rows(train, target or [], features, model, weights, trust)
    n_rows, n_features = sum(map(len, rows.batches)), len(rows.features)
    x = torch.from_numpy(rows.first[:, :n_features]).to(rows.dtype)
    y = np.zeros((len(x), rows.n_outputs))  # any targets will do, only their number counts
    with redirect_stdout(sys.stderr):
        found = PredictionIntervals(rows.network, **settings).plan([(x, y)], n_rows=n_rows)
    engines = [
        {"engine": str(option), "memory_bytes": option.nbytes, "seconds": option.seconds}
        | {"fits": option.nbytes <= found.memory, "chosen": option == found.chosen}
        for option in found.options
    ]
    sizes = {"rows": n_rows, "parameters": found.problem.n_parameters, "memory_bytes": found.memory}
    print_result({**sizes, "features": rows.features, "engines": engines}, str(found), as_json)


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
    noise: options.Noise = "auto",
    seed: options.Seed = 0,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Fit intervals to a trained network.

    They are fitted to its training rows and saved together with its weights. Give the --weight-decay of the optimiser,
    or λ itself as --damping. With --calibration on rows that the network was not trained on, neither is needed, and
    intervals cover at least as often as their level says, whatever the network.

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
    scale = None
    if target_mean or target_std:
        if len(target_mean or []) != len(target_std or []):
            raise Usage("give --target-mean and --target-std together, one of each for every target")
        scale = np.array(target_mean), np.array(target_std)
    rule = {"weight_decay": weight_decay, "damping": damping, "loss": loss, "batch_size": batch_size}
    settings = _check_settings(engine_text, memory, **rule, target_transform=scale, noise=noise)
    if weight_decay is None and damping is None and calibration is None:
        raise Usage("give --weight-decay or --damping, or --calibration, which needs neither")
    check_output(out, force, [".band"], [train, weights or train, Path(calibration or train), Path(model)])
    fraction, other = _open_calibration(calibration)
    rows = _open_training_rows(train, target, features, model, weights, trust)
    if scale is not None and len(scale[0]) != len(rows.targets):
        raise Usage(f"--target-mean and --target-std: give one of each for every target, {len(rows.targets)}")
    held_out: Iterator[np.ndarray] = iter(())
    if other is not None:
        columns = other.select([*rows.features, *rows.targets])
        held_out = other.numbers(columns, rows.dtype, f"checking {other.path.name}")
    band = PredictionIntervals(rows.network, **settings)
    with tempfile.SpooledTemporaryFile(MAX_BYTES_IN_MEMORY) as file, redirect_stdout(sys.stderr):
        drawn = np.random.default_rng(seed).random(store_rows(file, rows.batches)) < fraction
        selected = np.append(drawn, np.ones(store_rows(file, held_out), dtype=bool))  # for the calibration
        if selected.all() or (calibration is not None and not selected.any()):
            raise Refusal(f"{train} has no rows left for {'the fit' if selected.all() else 'calibration'}")
        stored = StoredRows(file, len(rows.features), len(rows.targets), rows.dtype, ~selected, scale or (0.0, 1.0))
        band.fit(stored, n_rows=stored.n_rows, progress=sys.stderr.isatty())
        if calibration is not None:
            band.calibrate(replace(stored, selected=selected, progress_label="calibrating"), noise=noise, seed=seed)
    n_calibration, needed = int(selected.sum()), rows_needed(0.95)
    if calibration is not None and n_calibration < needed:
        highest = n_calibration / (n_calibration + 1)
        warn(f"{n_calibration} calibration rows allow levels up to {highest:.3g}: 0.95 needs {needed} of them")
    megabytes = f"{storage.size(band, weights=True) / 1e6:,.4g} MB"
    if sys.stderr.isatty():
        print(f"writing {strip_control_characters(str(out))}, {megabytes}", file=sys.stderr)
    names = {"features": rows.features, "targets": rows.targets}
    notes = {"model": model, **{kind: json.dumps(each) for kind, each in names.items()}, "train": train.name}
    notes |= {} if calibration is None else {"calibration": calibration}
    storage.save(band, out, weights=True, notes=notes, overwrite=force)
    sizes = {"bytes": out.stat().st_size, "rows": band.n_rows_, "calibration_rows": n_calibration or None}
    found = {name: getattr(band, f"{name}_") for name in ("damping", "effective_parameters", "noise_std")}
    found = {"parameters": band.n_parameters_, **found, "seconds": time.perf_counter() - start}
    text = f"saved {out}, {megabytes}: {', '.join(rows.targets)} from {join_names(rows.features)}"
    print_result({"out": out, **sizes, **names, **found}, f"{band.summary()}\n{text}", as_json)


class _TrainingRows(NamedTuple):
    """The network and its training rows, of which only the first batch has been read."""

    network: nn.Module
    n_outputs: int
    dtype: torch.dtype
    features: list[str]
    targets: list[str]
    first: np.ndarray  # (b, features + targets)
    batches: Iterator[np.ndarray]  # of all rows, the first batch included


def _open_training_rows(
    path: Path, target: Sequence[str], features: Sequence[str] | None, model: str, weights: Path | None, trust: bool
) -> _TrainingRows:
    """Load the network, and check on the first rows that it takes the features and returns the targets."""
    table = open_table(path)
    targets = table.select(target)
    chosen = table.select(features) if features else [name for name in table.names if name not in targets]
    if both := set(chosen).intersection(targets):
        raise Usage(f"column {min(both)!r} cannot be both a feature and a target")
    if not chosen:
        raise Refusal(f"{path} has no columns except the targets")
    network = load_network(model, weights, trust)
    dtype = network_dtype(network)
    batches = table.numbers([*chosen, *targets], dtype, f"checking {path.name}")
    first = next(batches)
    device = next((w.device for w in network.parameters()), None)
    try:
        with torch.no_grad(), redirect_stdout(sys.stderr):
            y = network(torch.from_numpy(first[:2, : len(chosen)]).to(device, dtype))
    except Exception as error:
        given = f"{len(chosen)} features ({join_names(chosen)})"
        raise Refusal(f"the network failed on {given}: {with_type(error)}; see --features") from error
    if not isinstance(y, Tensor):
        raise Refusal(f"the network returns {type(y).__name__}: let the factory return one that picks the prediction")
    m = y[0].numel() if y.ndim else 1  # other problems are reported by the library
    if targets and m != len(targets):
        given = f"the number of targets is {len(targets)}: {join_names(targets)}"
        raise Refusal(f"the network returns {m} numbers per row, but {given}")
    return _TrainingRows(network, m, dtype, chosen, targets, first, itertools.chain([first], batches))


def _check_settings(engine_text: str, memory: str | None, **settings: Any) -> dict[str, Any]:
    """Return the keywords of PredictionIntervals, checked before any file is read."""
    settings |= {"engine": options.engine(engine_text), "memory": None if memory is None else options.nbytes(memory)}
    try:
        PredictionIntervals(nn.PReLU(), **settings)  # any module will do
    except (TypeError, ValueError) as error:
        raise Usage(str(error)) from error
    return settings


def _open_calibration(text: str | None) -> tuple[float, Table | None]:
    """Return the share of the training rows to hold out, and the table of other calibration rows."""
    if text is None:
        return 0.0, None
    try:
        fraction = float(text)
    except ValueError:
        return 0.0, open_table(Path(text))
    if not 0 < fraction < 1:
        raise Usage(f"--calibration must be a file, or a fraction between 0 and 1, got {text}")
    return fraction, None
