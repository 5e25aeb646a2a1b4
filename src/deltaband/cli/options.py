"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

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
ENGINES = (
    "auto, exact, nystrom:landmarks=2000, random-projection:dim=4096, important-directions:rank=200, "
    "robust-frequent-directions:rank=200 or frequent-directions:rank=200."
)
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
Calibration = Annotated[str | None, Option(metavar="FILE|FRACTION", help=CALIBRATION)]
Seed = Annotated[int, Option(min=0, help="Seed for drawing the rows of --calibration FRACTION.")]
EngineText = Annotated[str, Option("--engine", metavar="NAME[:KEY=VALUE,…]", help=ENGINES)]
Memory = Annotated[str | None, Option(metavar="SIZE", help=MEMORY)]
Level = Annotated[list[float] | None, Option("--level", metavar="LEVEL", help=LEVEL)]
By = Annotated[list[str] | None, Option(metavar="COLUMN", help="Show coverage by this column too; may be repeated.")]
Force = Annotated[bool, Option("--force", help="Replace the output file if it exists.")]
Json = Annotated[bool, Option("--json", help="Print JSON; numbers that are not finite become null.")]
