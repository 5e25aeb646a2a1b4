"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The network: package.module:factory, where factory is a function without arguments that returns the "
        "torch.nn.Module, or the module itself; the current folder is searched too. The network must scale its inputs "
        "itself if it was trained on scaled ones. Or a .pt2 file of torch.export, made in eval mode with a dynamic "
        "batch dimension; only with --trust.",
    ),
]
SavedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="The factory of the network, as for fit (`deltaband inspect` shows its name); the weights come from the "
        "band file. Nothing is imported unless it is named here.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Weights of the network: .safetensors, or a .pt state dict; only tensors are loaded."
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Load a .pt2 file although that can run code in it. Only if you trust the file."),
]
BandFile = Annotated[Path, typer.Argument(metavar="X.band", help="A file that `deltaband fit` has written.")]
FORMATS = (
    ".csv (first line: names of the columns), .parquet or .npz (arrays with one row per example; an array X of two "
    "dimensions is the columns X0, X1 …, and its name stands for all of them)."
)
Train = Annotated[Path, typer.Option(metavar="FILE", help=f"The rows the network was trained on: {FORMATS}")]
Data = Annotated[Path, typer.Option(metavar="FILE", help=f"The rows: {FORMATS} Columns are found by name.")]
Features = Annotated[
    list[str] | None,
    typer.Option(
        metavar="A,B,C",
        help="The columns that go into the network, in its order. Default: all but the targets.",
    ),
]
Target = Annotated[
    list[str],
    typer.Option(metavar="COLUMN", help="What the network predicts; once per output, in the network's order."),
]
OptionalTarget = Annotated[
    list[str] | None,
    typer.Option("--target", metavar="COLUMN", help="What the network predicts: columns that are not features."),
]
FILE_WITHOUT_NAMES = "Only for a band saved from Python, which has no column names."
SavedFeatures = Annotated[list[str] | None, typer.Option("--features", metavar="A,B,C", help=FILE_WITHOUT_NAMES)]
SavedTargets = Annotated[list[str] | None, typer.Option("--target", metavar="COLUMN", help=FILE_WITHOUT_NAMES)]
WeightDecay = Annotated[
    float | None, typer.Option(metavar="WD", help="The weight decay of the optimiser; λ follows from it and --loss.")
]
Damping = Annotated[float | None, typer.Option(metavar="LAMBDA", help="λ itself, instead of --weight-decay.")]
Loss = Annotated[
    str,
    typer.Option(metavar="mean|half_mean|sum", help="The squared loss of training: its mean, half of that, or a sum."),
]
BatchSize = Annotated[int | None, typer.Option(metavar="ROWS", help="Batch size of training; only with --loss sum.")]
TargetMean = Annotated[
    list[float] | None,
    typer.Option(metavar="M", help="If the network was trained on (target − M)/S; intervals are in the file's units."),
]
TargetStd = Annotated[list[float] | None, typer.Option(metavar="S", help="Standard deviation for --target-mean.")]
Calibration = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|FRACTION",
        help="Rows that the network was NOT trained on, to calibrate the intervals: a file, or a share of --train, "
        "namely the rows where numpy.random.default_rng(SEED).random(n) < FRACTION; train without them.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed for drawing the rows of --calibration FRACTION.")]
EngineText = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME[:KEY=VALUE,…]",
        help="auto, exact, nystrom:landmarks=2000, random-projection:dim=4096, important-directions:rank=200, "
        "robust-frequent-directions:rank=200 or frequent-directions:rank=200.",
    ),
]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory for the fit, such as 2GB. Default: half of what is free.")
]
Level = Annotated[
    list[float] | None,
    typer.Option("--level", metavar="LEVEL", help="Between 0 and 1; may be given more than once. Default: 0.95."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; numbers that are not finite become null.")]
