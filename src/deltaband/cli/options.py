"""Options that several commands share, and what their texts mean."""

import ast
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from ..engines import Engine, registered_engines
from ..results import level_name, parse_levels
from .models import import_module
from .output import Usage, near

FORMATS = (
    ".csv (first line: names of the columns), .parquet or .npz (arrays with one row per example; an array X of two "
    "dimensions is the columns X0, X1 …, and its name stands for all of them)."
)
MODEL = (
    "The network: package.module:factory, where factory is a function without arguments that returns the "
    "torch.nn.Module, or the module itself; the current folder is searched too. The network must scale its inputs "
    "itself if it was trained on scaled ones. Or a .pt2 file of torch.export, made in eval mode with a dynamic "
    "batch dimension; only with --trust."
)
SAVED_MODEL = (
    "The factory of the network, as for fit (`deltaband inspect` shows its name); the weights come from the band file. "
    "Nothing is imported unless it is named here."
)
CALIBRATION = (
    "Rows that the network was NOT trained on, to calibrate the intervals: a file, or a share of --train, namely the "
    "rows where numpy.random.default_rng(SEED).random(n) < FRACTION; train without them."
)
NOISE = "How large noise is, for --calibration: the same everywhere, or learnt from row to row (auto)."
SIZES = {name: cls.size_setting for name, cls in registered_engines().items()}
ENGINES = f"auto, {', '.join(f'{name}:{size}=500' if size else name for name, size in SIZES.items())}."
WEIGHTS = "Weights of the network: .safetensors, or a .pt state dict; only tensors are loaded."
TRUST = "Load a .pt2 file although that can run code in it. Only if you trust the file."
FEATURES = "The columns that go into the network, in its order. Default: all but the targets."
TARGET = "What the network predicts; once per output, in the network's order."
OPTIONAL_TARGET = "What the network predicts: columns that are not features."
FILE_WITHOUT_NAMES = "Only for a band saved from Python, which has no column names."
WEIGHT_DECAY = "The weight decay of the optimiser; λ follows from it and --loss."
LOSS = "The squared loss of training: its mean, half of that, or a sum."
TARGET_MEAN = "If the network was trained on (target − M)/S; intervals are in the file's units."
MEMORY = "Memory for the fit, such as 2GB. Default: half of what is free."
LEVEL = "Between 0 and 1; may be given more than once. Default: 0.95."
UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

Model = Annotated[str, Argument(metavar="MODEL", help=MODEL)]
SavedModel = Annotated[str | None, Option("--model", metavar="MODEL", help=SAVED_MODEL)]
Weights = Annotated[Path | None, Option(metavar="FILE", help=WEIGHTS)]
Trust = Annotated[bool, Option("--trust", help=TRUST)]
BandFile = Annotated[Path, Argument(metavar="X.band", help="A file that `deltaband fit` has written.")]
Train = Annotated[Path, Option(metavar="FILE", help=f"The rows the network was trained on: {FORMATS}")]
Data = Annotated[Path, Option(metavar="FILE", help=f"The rows: {FORMATS} Columns are found by name.")]
Features = Annotated[list[str] | None, Option(metavar="A,B,C", help=FEATURES)]
Target = Annotated[list[str], Option(metavar="COLUMN", help=TARGET)]
OptionalTarget = Annotated[list[str] | None, Option("--target", metavar="COLUMN", help=OPTIONAL_TARGET)]
SavedFeatures = Annotated[list[str] | None, Option("--features", metavar="A,B,C", help=FILE_WITHOUT_NAMES)]
SavedTargets = Annotated[list[str] | None, Option("--target", metavar="COLUMN", help=FILE_WITHOUT_NAMES)]
WeightDecay = Annotated[float | None, Option(metavar="WD", help=WEIGHT_DECAY)]
Damping = Annotated[float | None, Option(metavar="LAMBDA", help="λ itself, instead of --weight-decay.")]
Loss = Annotated[str, Option(metavar="mean|half_mean|sum", help=LOSS)]
BatchSize = Annotated[int | None, Option(metavar="ROWS", help="Batch size of training; only with --loss sum.")]
TargetMean = Annotated[list[float] | None, Option(metavar="M", help=TARGET_MEAN)]
TargetStd = Annotated[list[float] | None, Option(metavar="S", help="Standard deviation for --target-mean.")]
Noise = Annotated[str, Option(metavar="none|auto", help=NOISE)]
Calibration = Annotated[str | None, Option(metavar="FILE|FRACTION", help=CALIBRATION)]
Seed = Annotated[int, Option(min=0, help="Seed for drawing the rows of --calibration FRACTION.")]
EngineText = Annotated[str, Option("--engine", metavar="NAME[:KEY=VALUE,…]", help=ENGINES)]
Memory = Annotated[str | None, Option(metavar="SIZE", help=MEMORY)]
Level = Annotated[list[float] | None, Option("--level", metavar="LEVEL", help=LEVEL)]
By = Annotated[list[str] | None, Option(metavar="COLUMN", help="Show coverage by this column too; may be repeated.")]
Force = Annotated[bool, Option("--force", help="Replace the output file if it exists.")]
Json = Annotated[bool, Option("--json", help="Print JSON; numbers that are not finite become null.")]


def engine(text: str) -> Engine | Literal["auto"]:
    """Return the engine of `auto`, `nystrom`, `nystrom:landmarks=200,seed=1` or, of the user, `module:Class:rank=3`."""
    if text == "auto":
        return "auto"
    name, _, rest = text.partition(":")
    engines = registered_engines()
    cls = engines.get(name)
    if cls is None and rest and "=" not in rest.partition(":")[0]:
        attribute, _, rest = rest.partition(":")
        cls, name = _own_engine(name, attribute), f"{name}:{attribute}"
    if cls is None:
        known = sorted(engines, key=lambda each: (not engines[each].__module__.startswith("deltaband."), each))
        raise Usage(f"--engine: there is no {name!r}{near(name, known)}; there are auto, {', '.join(known)}")
    defaults = {each.name: each.default for each in dataclasses.fields(cls) if not callable(each.default)}
    takes = f"takes {', '.join(defaults)}" if defaults else "has no settings"
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in defaults:
            raise Usage(f"--engine: {part!r} is not a key=value of {name}{near(key, defaults)}, which {takes}")
        try:
            number = value.capitalize() if value.lower() in ("true", "false") else value
            values[key] = nbytes(value, "memory") if key == "memory" else ast.literal_eval(number)
        except (SyntaxError, ValueError):  # a word
            if type(defaults[key]) in (int, float):
                raise Usage(f"--engine: {part!r} is not a number, as {key} of {name} is") from None
            values[key] = value
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise Usage(f"--engine {text}: {error}") from error


def nbytes(text: str, option: str = "--memory") -> float:
    """Return the bytes that `2GB`, `500 MiB` or a number says."""
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None or not float(match[1]):
        raise Usage(f"{option} must be a number of bytes such as 2GB or 500MB, got {text!r}")
    return float(match[1]) * UNITS[match[2] or ""]


def _own_engine(module: str, name: str) -> type[Engine]:
    found = getattr(import_module(module, "--engine: "), name, None)
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise Usage(f"--engine: {module} has no engine {name!r}: a class derived from deltaband.engines.Engine")
    if found not in registered_engines().values():
        raise Usage(f"--engine: {module}:{name} is not registered: decorate it with @register")
    return found


def check_levels(given: Sequence[float]) -> tuple[float, ...]:
    shown = ", ".join(f"{each:g}" for each in given)
    try:
        levels = parse_levels(given)
    except ValueError:
        raise Usage(f"--level must be between 0 and 1 (0.95 for 95 %), got {shown}") from None
    if len(set(map(level_name, levels))) < len(levels):
        raise Usage(f"--level: some of {shown} are the same")
    return levels
