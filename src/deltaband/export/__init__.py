"""Bands as programs that run without deltaband: one `torch.export` program, or one ONNX file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calibration import Calibration
from ..data.inputs import Inputs
from ..errors import ExportError
from ..fitting.fit import Fit
from ..fitting.spec import FitSpec
from ..results import Intervals
from ..storage.container import atomic
from ..validation import check_choice
from ..version import __version__
from .gradients import first_line
from .program import Program

FORMATS = {"pt2": ".pt2", "onnx": ".onnx"}
EXAMPLE_ROWS = 3
TOLERANCE = 1e-5  # of an interval's width, or of the numbers themselves
LARGEST_ONNX = 1.9e9  # bytes: a file of this format holds no more
RETURNED = ["mean", "lower", "upper"]

Predict = Callable[[Any], Intervals]


def export(
    path: str | Path,
    format: str | None,
    spec: FitSpec,
    fits: Sequence[Fit],
    method: Any,
    levels: Any,
    predict: Predict,
    x: Any = None,
) -> None:
    """Write a program that returns what `predict` does, and compare both before it is kept.

    Args:
        path: The file.
        format: "pt2" or "onnx"; None: by the name of the file.
        spec: What was fitted.
        fits: The fits that bounds follow from.
        method: The formula or the calibration.
        levels: A level, or several.
        predict: The intervals of rows at these levels.
        x: Rows of inputs as users give them; made up by default.

    Raises:
        ExportError: If the band cannot be written so.
    """
    path = Path(path)
    format = _format(path, format)
    spec.check_weights(spec.network(), fits[0])
    raw = _raw(spec, fits[0], x)
    calibration = method if isinstance(method, Calibration) else None
    with torch.no_grad():
        program = Program(spec, fits, calibration, method, levels, raw).eval()
        exported = _exported(program, raw)
        _check(exported.module(), raw, predict)
        about = {"deltaband": __version__, "levels": levels, "returns": RETURNED, "inputs": str(raw.without_rows())}
        if format == "pt2":
            with atomic(path) as temporary, temporary.open("wb") as file:
                torch.export.save(exported, file, extra_files={"deltaband.json": json.dumps(about)})
        else:
            _write_onnx(path, exported, list(raw.names or ["x"] if raw.single else _numbered(raw)))


def _format(path: Path, format: str | None) -> str:
    if format is None:
        format = next((name for name, suffix in FORMATS.items() if path.suffix == suffix), None)
        if format is None:
            raise ValueError(f"the name of a program ends with .pt2 or .onnx, or give format=; got {path.name!r}")
    check_choice(format, "format", tuple(FORMATS))
    return format


def _numbered(raw: Inputs) -> Sequence[str]:
    return raw.names or [f"x{i}" for i in range(len(raw.tensors))]


def _raw(spec: FitSpec, fit: Fit, x: Any) -> Inputs:
    """Return some rows as users give them."""
    if spec.collate is not None:
        raise ExportError("a program takes tensors of any number of rows: a band of items cannot be exported")
    if x is not None:
        raw = Inputs.of(x)[: 2 * EXAMPLE_ROWS]
        if len(raw) == 0:
            raise ValueError("x= needs at least one row")
        return raw.map(lambda tensor: tensor.cpu())
    if fit.format is None:
        raise ValueError("the training rows had several formats: give x=, some rows of the format of the program")
    made = next((piece[: 2 * EXAMPLE_ROWS].without_extras() for piece in fit.sample.pieces), None)
    made = fit.format.made_up(2 * EXAMPLE_ROWS) if made is None else made.map(lambda tensor: tensor.cpu())
    transform = spec.input_transform
    if transform is None or transform.affine is None:
        return made
    mean, std = (torch.from_numpy(each) for each in (transform.affine.mean, transform.affine.std))
    return made.map(lambda tensor: transform.affine.inverse(tensor.double(), mean, std).to(tensor.dtype))  # type: ignore[union-attr]


def _exported(program: Program, raw: Inputs) -> Any:
    rows = raw.map(lambda tensor: tensor[torch.arange(EXAMPLE_ROWS) % len(tensor)])
    batch = torch.export.Dim("batch")
    try:
        return torch.export.export(program, rows.tensors, dynamic_shapes=(tuple({0: batch} for _ in rows.tensors),))
    except Exception as error:
        raise ExportError(
            f"torch.export refused the program: {first_line(error)}. The network must not depend on values or on the "
            "number of rows by Python code: use torch operations, torch.where instead of if, and no loop over rows"
        ) from error


def _check(module: Any, raw: Inputs, predict: Predict) -> None:
    """Raise unless a program answers as `predict`, also for other numbers of rows than it was made with."""
    repeated = raw.map(lambda tensor: torch.cat([tensor, tensor]))
    for rows in (raw[:1], repeated):
        expected, got = predict(rows.as_given()), module(*rows.tensors)
        ends = [torch.as_tensor(np.asarray(each)).double() for each in (expected.mean, expected.lower, expected.upper)]
        width = (ends[2] - ends[1]).abs()
        for name, mine, theirs in zip(RETURNED, got, ends, strict=True):
            size = theirs.abs() if name == "mean" else theirs.abs() + width
            if not torch.allclose(
                mine.double() / (size + 1e-30), theirs / (size + 1e-30), rtol=0.0, atol=10 * TOLERANCE
            ):
                worst = float(((mine.double() - theirs).abs() / (size + 1e-30)).max())
                raise ExportError(
                    f"the program's {name} differs from that of predict by {worst:.2g} of its size: its gradients are "
                    "not those of the network. Give x=, real rows of inputs; if it still does, open an issue"
                )


def _write_onnx(path: Path, exported: Any, names: list[str]) -> None:
    nbytes = sum(t.nbytes for t in exported.state_dict.values()) + sum(
        t.nbytes for t in exported.constants.values() if isinstance(t, Tensor)
    )
    if nbytes > LARGEST_ONNX:
        raise ExportError(
            f"an ONNX file holds 2 GB, and the program has {nbytes / 1e9:.3g} GB of numbers: use format='pt2'"
        )
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("ONNX needs onnx and onnxscript: pip install 'deltaband[onnx]'") from error
    with _quiet("torch.onnx"):
        try:
            program = torch.onnx.export(
                exported, dynamo=True, verbose=False, optimize=False, input_names=names, output_names=RETURNED
            )
        except Exception as error:
            raise ExportError(
                f"torch.onnx could not write the program: {first_line(error)}; format='pt2' holds it"
            ) from error
    assert program is not None
    with atomic(path) as temporary:
        program.save(str(temporary))


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Let a logger and those below it report errors alone."""
    loggers = [logging.getLogger(each) for each in [name, *logging.root.manager.loggerDict] if each.startswith(name)]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
