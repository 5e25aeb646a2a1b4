"""Options that several commands share, and what their texts mean."""

import ast
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from torch import nn
from typer import Argument, Option

from ..engines import Engine, registered_engines
from ..intervals import PredictionIntervals
from ..results import level_name, parse_levels
from .models import import_module
from .output import Usage, near

FORMATS = (
    ".csv or .csv.gz (first line: names of the columns), .parquet or .npz (arrays with one row per example; an array X "
    "of two dimensions is the columns X0, X1 …, and its name stands for all of them)."
)
MODEL = (
    "The network: package.module:factory, where factory is a function without arguments that returns the "
    "torch.nn.Module, or the module itself; the current folder is searched too. It may return a dictionary of model, "
    "input_transform and target_transform, for a network that was trained on scaled data. Or a .pt2 file of "
    "torch.export, made in eval mode with a dynamic batch dimension; only with --trust."
)
SAVED_MODEL = (
    "The factory of the network, as for fit (`deltaband inspect` shows its name); the weights come from the band file. "
    "Nothing is imported unless it is named here."
)
CALIBRATION = (
    "Rows that the network was NOT trained on, to calibrate the intervals: a file, or a share of --train, namely the "
    "rows where numpy.random.default_rng(SEED).random(n) < FRACTION; train without them."
)
WEIGHTED_CALIBRATION = "Let the weights of --sample-weight count in the calibration, too; else its rows are equals."
NOISE = "How large noise is, for --calibration: the same everywhere, or learnt from row to row (auto)."
SIZES = {name: cls.size_setting for name, cls in registered_engines().items()}
ENGINES = f"auto, {', '.join(f'{name}:{size}=500' if size else name for name, size in SIZES.items())}."
WEIGHTS = (
    "Weights of the network: .safetensors, a .pt state dict, or a checkpoint (.ckpt) that holds one; only tensors are "
    "loaded."
)
OWN_WEIGHTS = "The factory's weights are right, although they look as if they were never trained."
TRUST = "Load a .pt2 file although that can run code in it. Only if you trust the file."
FEATURES = "The columns that go into the network, in its order. Default: all that no other option names."
EXCLUDE = "A column that is not a feature; may be repeated."
TARGET = "What the network predicts; once per output, in the network's order."
OPTIONAL_TARGET = "What the network predicts: columns that are not features."
FILE_WITHOUT_NAMES = "Only for a band saved from Python, which has no column names."
WEIGHT_DECAY = "The weight decay of the optimiser; λ follows from it and --loss."
LOSS = (
    "The squared loss of training: its mean, half of that, a sum, or a sum divided by that of the weights; or a "
    "Gaussian likelihood, the default with --variance. Default: mean."
)
STANDARDISE = (
    "The network was trained on standardised features and targets, (x − mean)/std with mean and std of the training "
    "rows, as by scikit-learn's StandardScaler. All files hold them as they are, and intervals are in these units."
)
SCALING = (
    'The same with means and stds from a JSON file: {"area": {"mean": 110, "std": 52}, …}, all features and targets by '
    "name."
)
TARGET_MEAN = (
    "The network was trained on (target − M)/S; intervals are in the file's units. With --standardise or --scaling it "
    "counts instead of these: 0, with --target-std 1, for targets as they are."
)
SAMPLE_WEIGHT = (
    "The column with the weights of rows in the training loss: a row of weight w has the noise variance s²/w."
)
SAVED_SAMPLE_WEIGHT = "A column with weights of these rows: a row of weight w has the noise variance s²/w. Default: 1."
ROBUST = "Variances of predictions follow from each row's own residual, for noise that differs from row to row."
CLUSTERS = "With --robust HC0 or HC1: the column that says which rows belong together, such as a patient or a series."
GROUPS = (
    "With --calibration: the column that has the groups of rows, words or numbers. Intervals cover each group at their "
    "level. It is a feature only if --features names it."
)
SAVED_GROUPS = "The column that has the groups of rows, if the band was calibrated by groups. Default: that of fit."
UNKNOWN = "What to do with a group that no calibration row had: refuse it, or take the quantile of all rows."
VARIANCE = (
    "The network returns this after its prediction: the variance of its noise, the logarithm of that, or its std."
)
QUANTILES = (
    "The network was trained for these three quantiles with pinball loss, and returns them; needs --calibration."
)
CLASSES = (
    "The network is a classifier, and --target the column of labels, whole numbers from 0: intervals of the "
    "probability of the label predicted for each row, or of all labels, or of some."
)
SETS = (
    "With --classes and --calibration: how sets of labels are made, the smallest on average (lac) or more even (aps)."
)
BY_CLASS = "With --classes and --calibration: sets hold the true label as often as asked for each true label."
KIND = (
    "Intervals for a new observation, or for the mean that the network estimates (a confidence band, by the formula)."
)
SIDE = "Both bounds, or one bound alone at the level."
MEMORY = "Memory for the fit, such as 2GB. Default: half of what is free."
LEVEL = "Between 0 and 1; may be given more than once. Default: 0.95."
UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

Model = Annotated[str, Argument(metavar="MODEL", help=MODEL)]
SavedModel = Annotated[str | None, Option("--model", metavar="MODEL", help=SAVED_MODEL)]
Weights = Annotated[Path | None, Option(metavar="FILE", help=WEIGHTS)]
OwnWeights = Annotated[bool, Option("--own-weights", help=OWN_WEIGHTS)]
Trust = Annotated[bool, Option("--trust", help=TRUST)]
BandFile = Annotated[Path, Argument(metavar="X.band", help="A file that `deltaband fit` has written.")]
Train = Annotated[Path, Option(metavar="FILE", help=f"The rows the network was trained on: {FORMATS}")]
Data = Annotated[Path, Option(metavar="FILE", help=f"The rows: {FORMATS} Columns are found by name.")]
Features = Annotated[list[str] | None, Option(metavar="A,B,C", help=FEATURES)]
Exclude = Annotated[list[str] | None, Option(metavar="COLUMN", help=EXCLUDE)]
Target = Annotated[list[str], Option(metavar="COLUMN", help=TARGET)]
OptionalTarget = Annotated[list[str] | None, Option("--target", metavar="COLUMN", help=OPTIONAL_TARGET)]
SavedFeatures = Annotated[list[str] | None, Option("--features", metavar="A,B,C", help=FILE_WITHOUT_NAMES)]
SavedTargets = Annotated[list[str] | None, Option("--target", metavar="COLUMN", help=FILE_WITHOUT_NAMES)]
WeightDecay = Annotated[float | None, Option(metavar="WD", help=WEIGHT_DECAY)]
Damping = Annotated[float | None, Option(metavar="LAMBDA", help="λ itself, instead of --weight-decay.")]
Loss = Annotated[str | None, Option(metavar="mean|half_mean|sum|weighted_mean|gaussian_nll", help=LOSS)]
BatchSize = Annotated[int | None, Option(metavar="ROWS", help="Batch size of training; only with --loss sum.")]
Standardise = Annotated[bool, Option("--standardise", help=STANDARDISE)]
ScalingFile = Annotated[Path | None, Option("--scaling", metavar="FILE.json", help=SCALING)]
TargetMean = Annotated[list[float] | None, Option(metavar="M", help=TARGET_MEAN)]
TargetStd = Annotated[list[float] | None, Option(metavar="S", help="Standard deviation for --target-mean.")]
SampleWeight = Annotated[str | None, Option(metavar="COLUMN", help=SAMPLE_WEIGHT)]
SavedSampleWeight = Annotated[str | None, Option("--sample-weight", metavar="COLUMN", help=SAVED_SAMPLE_WEIGHT)]
Robust = Annotated[str | None, Option(metavar="HC0|HC1|HC2|HC3", help=ROBUST)]
Clusters = Annotated[str | None, Option(metavar="COLUMN", help=CLUSTERS)]
Groups = Annotated[str | None, Option(metavar="COLUMN", help=GROUPS)]
SavedGroups = Annotated[str | None, Option("--groups", metavar="COLUMN", help=SAVED_GROUPS)]
Unknown = Annotated[str, Option("--unknown", metavar="error|pool", help=UNKNOWN)]
Variance = Annotated[str | None, Option(metavar="variance|log_variance|std", help=VARIANCE)]
Quantiles = Annotated[str | None, Option(metavar="0.05,0.5,0.95", help=QUANTILES)]
Classes = Annotated[str | None, Option(metavar="predicted|all|0,2", help=CLASSES)]
Sets = Annotated[str, Option("--sets", metavar="lac|aps", help=SETS)]
ByClass = Annotated[bool, Option("--by-class", help=BY_CLASS)]
WeightedCalibration = Annotated[bool, Option("--weighted-calibration", help=WEIGHTED_CALIBRATION)]
Noise = Annotated[str, Option(metavar="none|auto", help=NOISE)]
Calibration = Annotated[str | None, Option(metavar="FILE|FRACTION", help=CALIBRATION)]
Seed = Annotated[int, Option(min=0, help="Seed for drawing the rows of --calibration FRACTION.")]
EngineText = Annotated[str, Option("--engine", metavar="NAME[:KEY=VALUE,…]", help=ENGINES)]
Memory = Annotated[str | None, Option(metavar="SIZE", help=MEMORY)]
Level = Annotated[list[float] | None, Option("--level", metavar="LEVEL", help=LEVEL)]
Kind = Annotated[str, Option(metavar="observation|mean", help=KIND)]
SideText = Annotated[str, Option("--side", metavar="both|lower|upper", help=SIDE)]
By = Annotated[list[str] | None, Option(metavar="COLUMN", help="Show coverage by this column too; may be repeated.")]
Force = Annotated[bool, Option("--force", help="Replace the output file if it exists.")]
Json = Annotated[bool, Option("--json", help="Print JSON; numbers that are not finite become null.")]

NOT_FOR_CLASSES = (
    *("--loss", "--batch-size", "--sample-weight", "--weighted-calibration", "--noise", "--variance", "--quantiles"),
    *("--robust", "--clusters", "--groups", "--target-mean"),
)
NAMED_ALIKE = (
    "damping loss engine memory noise variance quantiles robust clusters groups unknown level kind side seed classes"
)
# arguments of the library, which its messages name, as they are typed
TYPED = {name: f"--{name}" for name in NAMED_ALIKE.split(" ")} | {
    "weight_decay": "--weight-decay",
    "batch_size": "--batch-size",
    "sample_weight": "--sample-weight",
    "by_class": "--by-class",
    "target_transform": "--standardise, --scaling or --target-mean",
    "input_transform": "--standardise or --scaling",
}
# what messages say of `targets=`: tables always hold them in original units
OF_TARGETS = {
    "(target_transform=, targets=)": "(target_transform=)",
    "and targets='original' was given: leave that out, or give the targets": "and tables hold them",
}


def as_typed(message: str, words: bool = False) -> str:
    """Return a message of the library with its arguments as options; `words`: also where no `=` follows."""

    def option(found: re.Match[str]) -> str:
        name, equals, value = found.groups()
        if not (equals or words or "_" in name):
            return found[0]
        return f"{TYPED[name]} {value}" if value else TYPED[name]

    for of_library, of_tables in OF_TARGETS.items():
        message = message.replace(of_library, of_tables)
    return re.sub(rf"(?<![\w'\"-])({'|'.join(TYPED)})(?![\w(])(=)?(?:(?<==)['\"]?([\w.]+)['\"]?)?", option, message)


def settings(engine_text: str, memory: str | None, quantiles: str | None = None, **others: Any) -> dict[str, Any]:
    """Return the keywords of PredictionIntervals, checked before any file is read."""
    found = others | {"engine": engine(engine_text), "memory": None if memory is None else nbytes(memory)}
    if quantiles is not None:
        try:
            found["quantiles"] = tuple(float(level) for level in quantiles.split(","))
        except ValueError:
            raise Usage(f"--quantiles must be three levels as in 0.05,0.5,0.95, got {quantiles!r}") from None
    checked(PredictionIntervals, nn.PReLU(), **found)  # any module will do
    return found


def target_scale(means: Sequence[float] | None, stds: Sequence[float] | None) -> dict[str, Any]:
    """Return the keywords for --target-mean and --target-std, if they are given."""
    if not means and not stds:
        return {}
    if not means or not stds or len(means) != len(stds):
        raise Usage("give --target-mean and --target-std together, one of each for every target")
    if not (np.isfinite([*means, *stds]).all() and min(stds) > 0):
        raise Usage("--target-mean and --target-std: finite numbers are expected, and --target-std above 0")
    return {"target_transform": (np.array(means), np.array(stds)), "targets": "original"}


def check_together(given: Mapping[str, Any]) -> None:
    """Raise if options of a fit exclude each other, or need others; values of options that are not given are false."""
    there = {option for option, value in given.items() if value is not None and value is not False}
    for one, two in (("--standardise", "--scaling"), ("--weights", "--own-weights")):
        if {one, two} <= there:
            raise Usage(f"give {one} or {two}, not both")
    for option, needed in (
        ("--clusters", "--robust"),
        ("--quantiles", "--calibration"),
        ("--groups", "--calibration"),
        ("--weighted-calibration", "--calibration"),
        ("--weighted-calibration", "--sample-weight"),
        ("--by-class", "--classes"),
        ("--by-class", "--calibration"),
        ("--sets", "--classes"),
        ("--sets", "--calibration"),
    ):
        if option in there and needed not in there:
            raise Usage(f"{option} needs {needed}")
    if "--classes" in there:
        if wrong := next((each for each in NOT_FOR_CLASSES if each in there), None):
            raise Usage(f"{wrong} is for predictions of numbers, and --classes says that the network predicts labels")
        if not there & {"--weight-decay", "--damping"}:
            raise Usage("--classes needs --weight-decay or --damping (any, --damping 1 say, for sets of labels alone)")
    if not there & {"--weight-decay", "--damping", "--calibration"}:
        raise Usage("give --weight-decay or --damping, or --calibration, which needs neither")
    if "--robust" in there and not there & {"--weight-decay", "--damping"}:
        raise Usage("--robust needs --weight-decay or --damping")


def checked(check: Callable[..., Any], *values: Any, **named: Any) -> None:
    """Let the library check values of options."""
    try:
        check(*values, **named)
    except (TypeError, ValueError) as error:
        raise Usage(as_typed(str(error), words=True)) from error


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
    """Return the number of bytes of a text such as `2GB`, `500 MiB` or a number."""
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
