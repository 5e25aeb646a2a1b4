"""Every exception and warning of the library, and `warn`, which shows the user's own line."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

PACKAGE = str(Path(__file__).parent) + os.sep


class DeltabandWarning(UserWarning):
    """Something makes the intervals less trustworthy than they look."""


class UnreliableFormulaWarning(DeltabandWarning):
    """The formula is unreliable for this network; a calibration makes up for it."""


class MisfitWarning(DeltabandWarning):
    """The rows do not look like those the network was trained on: its weights, or their units or scaling, are wrong."""


class FormulaMessage(str):
    """The text of an `UnreliableFormulaWarning`, among the texts of other warnings."""

    category = UnreliableFormulaWarning


class MisfitMessage(str):
    """The text of a `MisfitWarning`."""

    category = MisfitWarning


class InputsMessage(MisfitMessage):
    """The text of a `MisfitWarning` about inputs; for several batches it is said once."""


class NotFittedError(ValueError, AttributeError):
    """A result was requested that only a fitted band can give."""


class EmptyDataError(ValueError):
    """The data hold no rows."""


class NoGradientError(ValueError):
    """The network's output does not depend on any of the selected parameters."""


class ChangedShapeError(ValueError):
    """The network returns another number of outputs for some rows than for the first ones."""


class SingularMatrixError(ValueError):
    """A damped Gram matrix has no usable Cholesky factor."""


def not_regular(reason: str) -> ValueError:
    """Return the error for damping 0 where JᵀJ has no inverse, or none that an engine can compute."""
    return ValueError(f"damping 0 needs a regular JᵀJ, but {reason}: give a positive damping or weight_decay")


class ExportError(ValueError):
    """A band cannot be written as one program of tensors."""


class ArtefactError(ValueError):
    """A file is not a band or a checkpoint, is damaged, or does not belong to the model."""


class DamagedArtefactError(ArtefactError):
    """A file starts like a file of deltaband, or is empty, and is not complete."""


class DistributedFitError(RuntimeError):
    """Another process has failed or does not answer; the fit has ended in all processes."""


_SAID: ContextVar[set[object] | None] = ContextVar("said", default=None)


@contextmanager
def said_once() -> Iterator[None]:
    """Let `warn` say each message once, and one `InputsMessage` at most, within the block."""
    token = _SAID.set(set())
    try:
        yield
    finally:
        _SAID.reset(token)


class _Everything(set[object]):
    """Holds all that there is."""

    def __contains__(self, _: object) -> bool:
        return True


@contextmanager
def silenced() -> Iterator[None]:
    """Let `warn` say nothing within the block."""
    token = _SAID.set(_Everything())
    try:
        yield
    finally:
        _SAID.reset(token)


def warn(*messages: str) -> None:
    """Issue each message as a `DeltabandWarning` that points at the user's line which called the library."""
    # the outermost frame of the package, not the innermost: loaders and hooks of the user may lie in between
    frame, level, users_level = sys._getframe(1), 2, 2
    while frame.f_back is not None:
        inside, frame = frame.f_code.co_filename.startswith(PACKAGE), frame.f_back
        if inside and not frame.f_code.co_filename.startswith(PACKAGE):
            users_level = level + 1
        level += 1
    said = _SAID.get()
    for message in messages:
        kind = InputsMessage if isinstance(message, InputsMessage) else message
        if said is not None and kind in said:
            continue
        if said is not None:
            said.add(kind)
        warnings.warn(message, getattr(message, "category", DeltabandWarning), stacklevel=users_level)
