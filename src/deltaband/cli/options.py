"""The options that commands share, each told once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL_HELP = (
    "The network: package.module:factory, where factory is a function without arguments that returns the "
    "torch.nn.Module, or the module itself; looked up in the current folder too. Whatever scaling of its inputs it was "
    "trained with belongs into it. Or a .pt2 file of torch.export, made in eval mode with a dynamic batch dimension; "
    "only with --trust."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
SameModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="The network's factory again, as for fit (`deltaband inspect` shows its name); the weights come from the "
        "band file. Nothing is imported unless it is named here.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Its weights: .safetensors, or a .pt state dict, of which only tensors are loaded.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Load a .pt2 file although that can run code which is in it. Only if you trust it."),
]
DATA_HELP = (
    ".csv (with a line of names), .parquet or .npz (each array with a row for each example; an array X of two "
    "dimensions is the columns X0, X1 …, and its name stands for all of them); read some rows at a time."
)
Train = Annotated[Path, typer.Option(metavar="FILE", help=f"The rows the network was trained on: {DATA_HELP}")]
Data = Annotated[Path, typer.Option(metavar="FILE", help=f"The rows: {DATA_HELP} Columns are found by name.")]
Features = Annotated[
    list[str] | None,
    typer.Option(
        metavar="A,B,C",
        help="The columns that go into the network, in its order. Default: all but the targets.",
    ),
]
Target = Annotated[
    list[str],
    typer.Option(metavar="COLUMN", help="What the network predicts; once for each output, in the network's order."),
]
NoFeatures = Annotated[
    list[str] | None,
    typer.Option("--target", metavar="COLUMN", help="What the network predicts: columns that are no features."),
]
SameFeatures = Annotated[
    list[str] | None,
    typer.Option("--features", metavar="A,B,C", help="Only for a band saved by Python, which knows no names."),
]
SameTargets = Annotated[
    list[str] | None,
    typer.Option("--target", metavar="COLUMN", help="Only for a band saved by Python, which knows no names."),
]
WeightDecay = Annotated[
    float | None, typer.Option(metavar="WD", help="The weight decay the optimiser was given; with --loss it gives λ.")
]
Damping = Annotated[float | None, typer.Option(metavar="LAMBDA", help="λ itself, in the place of --weight-decay.")]
Loss = Annotated[
    str,
    typer.Option(metavar="mean|half_mean|sum", help="The squared loss of training: its mean, half of that, or a sum."),
]
BatchSize = Annotated[int | None, typer.Option(metavar="ROWS", help="Of training; only with --loss sum.")]
TargetMean = Annotated[
    list[float] | None,
    typer.Option(metavar="M", help="If the network was trained on (target − M)/S; intervals are in the file's units."),
]
TargetStd = Annotated[list[float] | None, typer.Option(metavar="S", help="Goes with --target-mean.")]
Calibration = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|FRACTION",
        help="Rows that the network was NOT trained on, to put the intervals right with: a file, or a share of "
        "--train, namely the rows where numpy.random.default_rng(SEED).random(n) < FRACTION; train without them.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Of --calibration FRACTION.")]
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
    str | None, typer.Option(metavar="SIZE", help="For the fit, such as 2GB. Default: half of what is free.")
]
Level = Annotated[
    list[float] | None,
    typer.Option("--level", metavar="LEVEL", help="Between 0 and 1; may be given more than once. Default: 0.95."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; null stands for what is not a finite number.")]
