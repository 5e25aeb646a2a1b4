"""Commands that read training rows: plan, fit."""

import itertools
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from .. import storage
from ..calibration import rows_needed
from ..classification import ClassificationIntervals
from ..errors import UnreliableFormulaWarning, warn
from ..fitting.tasks import Regression
from ..intervals import PredictionIntervals
from . import classify, options
from .groups import all_labels
from .groups import calibrate as calibrate_by_groups
from .models import Made, check_trained, inputs_dtype, load_network
from .output import Refusal, Usage, join_names, print_result, strip_control_characters, with_type
from .rows import Columns, as_stored, store
from .scaling import check_names, read_scaling, standardisation
from .tables import Table, check_output, open_table

CALIBRATED = ", which the fit takes"  # why a column of the calibration rows is needed
MAX_BYTES_IN_MEMORY = 2**27  # stored rows that take more go to a temporary file


def plan(
    model: options.Model,
    train: options.Train,
    target: options.OptionalTarget = None,
    features: options.Features = None,
    exclude: options.Exclude = None,
    weights: options.Weights = None,
    trust: options.Trust = False,
    weight_decay: options.WeightDecay = None,
    damping: options.Damping = None,
    variance: options.Variance = None,
    quantiles: options.Quantiles = None,
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
    rule = {"weight_decay": weight_decay, "damping": damping, "variance": variance}
    settings = options.settings(engine_text, memory, quantiles, **rule)
    table = open_table(train)
    columns = Columns.of(table, target or [], features, exclude)
    made = load_network(model, weights, trust)
    dtype = inputs_dtype(made, "input_transform" in made.transforms)
    settings |= {name: each for name, each in made.transforms.items() if name == "input_transform"}
    rows = _open_rows(table, columns, made, dtype, partial(PredictionIntervals, made.network, **settings))
    n_rows, n_features = sum(map(len, rows.batches)), len(columns.features)
    x = torch.from_numpy(rows.first[:, :n_features]).to(dtype)
    y = np.zeros((len(x), rows.n_outputs))  # any targets will do, only their number counts
    with redirect_stdout(sys.stderr):
        found = PredictionIntervals(made.network, **settings).plan([(x, y)], n_rows=n_rows)
    engines = [
        {"engine": str(option), "memory_bytes": option.nbytes, "seconds": option.seconds}
        | {"fits": option.nbytes <= found.memory, "chosen": option == found.chosen}
        for option in found.options
    ]
    sizes = {"rows": n_rows, "parameters": found.problem.n_parameters, "memory_bytes": found.memory}
    print_result({**sizes, "features": columns.features, "engines": engines}, str(found), as_json)


def fit(
    model: options.Model,
    train: options.Train,
    target: options.Target,
    out: Annotated[Path, typer.Option(metavar="X.band", help="The band file to write.")],
    features: options.Features = None,
    exclude: options.Exclude = None,
    weights: options.Weights = None,
    own_weights: options.OwnWeights = False,
    trust: options.Trust = False,
    standardise: options.Standardise = False,
    scaling: options.ScalingFile = None,
    target_mean: options.TargetMean = None,
    target_std: options.TargetStd = None,
    weight_decay: options.WeightDecay = None,
    damping: options.Damping = None,
    loss: options.Loss = None,
    batch_size: options.BatchSize = None,
    sample_weight: options.SampleWeight = None,
    calibration: options.Calibration = None,
    weighted_calibration: options.WeightedCalibration = False,
    noise: options.Noise = "auto",
    variance: options.Variance = None,
    quantiles: options.Quantiles = None,
    classes: options.Classes = None,
    sets: options.Sets = "lac",
    by_class: options.ByClass = False,
    robust: options.Robust = None,
    clusters: options.Clusters = None,
    groups: options.Groups = None,
    seed: options.Seed = 0,
    engine_text: options.EngineText = "auto",
    memory: options.Memory = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Fit intervals to a trained network.

    They are fitted to its training rows and saved together with its weights. Give the --weight-decay of the optimiser,
    or λ itself as --damping. With --calibration on rows that the network was not trained on, neither is needed, and
    intervals cover at least as often as their level says, whatever the network. If the network was trained on scaled
    data, say how: --standardise, --scaling, or a factory that returns the transforms.

    \b
    Examples:
      deltaband fit network:make --weights w.safetensors --train train.csv --target price --standardise \\
          --weight-decay 1e-3 --out price.band
      deltaband fit network:make --weights last.ckpt --train train.parquet --target price --exclude id \\
          --scaling scaling.json --calibration held_out.parquet --out price.band
      deltaband fit exported.pt2 --trust --train train.npz --features X --target y \\
          --damping 7.2 --engine important-directions:rank=200 --out y.band
    """
    start = time.perf_counter()
    rule = {"weight_decay": weight_decay, "damping": damping, "loss": loss, "batch_size": batch_size}
    given: dict[str, Any] = {"--standardise": standardise, "--scaling": scaling, "--weights": weights}
    given |= {"--own-weights": own_weights, "--quantiles": quantiles, "--robust": robust, "--clusters": clusters}
    given |= {"--weight-decay": weight_decay, "--damping": damping, "--calibration": calibration}
    given |= {"--sample-weight": sample_weight, "--weighted-calibration": weighted_calibration, "--groups": groups}
    given |= {"--loss": loss, "--batch-size": batch_size, "--variance": variance, "--target-mean": target_mean}
    given |= {"--noise": noise != "auto", "--classes": classes, "--sets": sets != "lac", "--by-class": by_class}
    options.check_together(given)
    make: Any = PredictionIntervals
    if classes is None:
        settings = options.settings(
            engine_text, memory, quantiles, **rule, noise=noise, variance=variance, robust=robust
        ) | options.target_scale(target_mean, target_std)
    else:
        make, settings = (
            ClassificationIntervals,
            classify.settings(engine_text, memory, classes, sets, weight_decay, damping),
        )
    read = [train, weights or train, scaling or train, Path(calibration or train), Path(model)]
    check_output(out, force, [".band"], read)
    fraction, other = _open_calibration(calibration)
    table = open_table(train)
    if groups is not None and groups in table.select(target):
        raise Usage(f"--groups {groups} is a target, which new rows do not have")
    excluded = [*(exclude or []), *([groups] if groups in table.names and not features else [])]
    columns = Columns.of(table, target, features, list(dict.fromkeys(excluded)), sample_weight, clusters)
    if classes is not None and len(columns.targets) != 1:
        raise Usage(f"--classes: one --target is expected, the column of labels, got {join_names(columns.targets)}")
    labels = None if groups is None else all_labels(other or table, groups)
    if target_mean and len(target_mean) != len(columns.targets):
        raise Usage(f"--target-mean and --target-std: give one of each for every target, {len(columns.targets)}")
    file_scaling, scaled_targets = None, not target_mean and classes is None
    if scaling is not None:
        needed = columns.targets if scaled_targets else []
        file_scaling = read_scaling(scaling, columns.features, needed, table.names)
    made = load_network(model, weights, trust, watched=weights is None and not own_weights)
    check_trained(made, model)
    transforms = made.transforms
    if transforms and (standardise or scaling is not None):
        option = "--standardise" if standardise else "--scaling"
        raise Usage(f"{model} returns {' and '.join(transforms)} itself: leave {option} out")
    check_names(transforms, columns, model)
    if "target_transform" in transforms:
        if classes is not None:
            raise Usage(f"{model} returns target_transform, and --classes says that targets are labels")
        if target_mean:
            raise Usage(f"{model} returns target_transform itself: leave --target-mean and --target-std out")
        settings |= {"targets": "original"}
    dtype = inputs_dtype(made, standardise or scaling is not None or "input_transform" in transforms)
    rows = _open_rows(table, columns, made, dtype, partial(make, made.network, **(settings | transforms)))
    held_out_columns = replace(columns, clusters=None, weight=sample_weight if weighted_calibration else None)
    with (
        tempfile.SpooledTemporaryFile(MAX_BYTES_IN_MEMORY) as file,
        tempfile.SpooledTemporaryFile(MAX_BYTES_IN_MEMORY) as other_file,
        redirect_stdout(sys.stderr),
    ):
        stored = store(file, columns, rows.batches, dtype)
        drawn = np.random.default_rng(seed).random(stored.n_rows) < fraction
        held_out = replace(stored, selected=drawn)
        if other is not None:
            held_out = store(other_file, held_out_columns, held_out_columns.read(other, dtype, CALIBRATED), dtype)
        stored = replace(stored, selected=~drawn, extras=columns.extras)
        if stored.n_rows == 0 or (calibration is not None and held_out.n_rows == 0):
            raise Refusal(f"{train} has no rows left for {'calibration' if stored.n_rows else 'the fit'}")
        if standardise:
            file_scaling = standardisation(stored, targets=scaled_targets)
        if file_scaling is not None:
            transforms = {"input_transform": file_scaling.of(columns.features)}
            if scaled_targets:
                transforms["target_transform"] = file_scaling.of(columns.targets)
                settings |= {"targets": "original"}
        if columns.extras:
            settings |= {"batch": as_stored}
        band = make(made.network, **settings | transforms)
        with warnings.catch_warnings():
            if calibration is not None:  # which makes up for it
                warnings.simplefilter("ignore", UnreliableFormulaWarning)
            band.fit(stored, n_rows=stored.n_rows, progress=sys.stderr.isatty())
        if calibration is not None:
            extras = ["sample_weight"] if weighted_calibration else []
            held_out = replace(held_out, extras=extras, progress_label="calibrating")
            if classes is not None:
                band.calibrate(held_out, method=sets, by_class=by_class, seed=seed)
            elif labels is None:
                band.calibrate(held_out, noise=noise, seed=seed)
            else:
                calibrate_by_groups(band, held_out, labels[held_out.selected], noise=noise, seed=seed)
    n_calibration, needed_rows = held_out.n_rows, rows_needed(0.95)
    if calibration is not None and n_calibration < needed_rows:
        highest = n_calibration / (n_calibration + 1)
        warn(f"{n_calibration} calibration rows allow levels up to {highest:.3g}: 0.95 needs {needed_rows} of them")
    megabytes = f"{storage.size(band, weights=True) / 1e6:,.4g} MB"
    if sys.stderr.isatty():
        print(f"writing {strip_control_characters(str(out))}, {megabytes}", file=sys.stderr)
    names = {"features": columns.features, "targets": columns.targets}
    scales = {} if file_scaling is None else {"scaling": file_scaling.about()}
    notes = {"model": model, **{kind: json.dumps(each) for kind, each in (names | scales).items()}, "train": train.name}
    notes |= {} if calibration is None else {"calibration": calibration}
    notes |= {} if groups is None else {"groups": groups}
    storage.save(band, out, weights=True, notes=notes, overwrite=force)
    sizes = {"bytes": out.stat().st_size, "rows": band.n_rows_, "calibration_rows": n_calibration or None}
    found = {name: getattr(band, f"{name}_", None) for name in ("damping", "effective_parameters", "noise_std")}
    found = {"parameters": band.n_parameters_, **found, "seconds": time.perf_counter() - start}
    text = f"saved {out}, {megabytes}: {', '.join(columns.targets)} from {join_names(columns.features)}"
    print_result({"out": out, **sizes, **names, **scales, **found}, f"{band.summary()}\n{text}", as_json)


class _Rows(NamedTuple):
    """Rows of which only the first batch has been read, and what the network returns for them."""

    n_outputs: int
    first: np.ndarray  # (b, all columns)
    batches: Iterator[np.ndarray]  # of all rows, the first batch included


def _open_rows(table: Table, columns: Columns, made: Made, dtype: torch.dtype, make: Callable[[], Any]) -> _Rows:
    """Check on the first rows that the network takes the features and returns the targets."""
    batches = columns.read(table, dtype)
    first = next(batches)
    features, targets = columns.features, columns.targets
    try:
        with redirect_stdout(sys.stderr):
            spec = make().spec
            m = spec.model_outputs(spec.inputs(torch.from_numpy(first[:2, : len(features)]).to(dtype))).shape[1]
    except Exception as error:
        given = f"{len(features)} features ({join_names(features)})"
        raise Refusal(f"the network failed on {given}: {options.as_typed(with_type(error))}; see --features") from error
    if targets and m != len(targets) and isinstance(spec.task, Regression):
        given = f"the number of targets is {len(targets)}: {join_names(targets)}"
        raise Refusal(f"the network returns {m} numbers per row, but {given}; see --variance and --quantiles")
    return _Rows(m, first, itertools.chain([first], batches))


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
