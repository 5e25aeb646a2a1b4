"""An exact fit in a form of fixed cost: the same rows, projected at random, as few dimensions as a tolerance allows.

How far widths are off is measured: on rows that the user gives, or on training rows that the fit has kept.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from ..data.inputs import Inputs
from ..engines import EigenbasisCovariance, ExactCovariance, Known, RandomProjection
from ..error_report import ErrorReport
from ..network.gradient_batch import CHUNK_ROWS_AT_LEAST, GradientBatch, StoredBlock
from ..network.layers.factors import DenseRows
from ..network.layers.projection import weight_shapes
from ..network.network import Network, plain_autograd
from .fit import Fit
from .spec import FitSpec

MEASURED_ROWS = 512  # training rows whose widths are compared, if the user gives none
FEWEST_DIMENSIONS, MOST_DIMENSIONS = 64, 2**14

Widths = Callable[[Sequence[Fit], Inputs], np.ndarray]  # (b, m), up to a factor that all rows have in common


def compressed(
    spec: FitSpec, fits: Sequence[Fit], x: Inputs | None, tolerance: float, seed: int, widths: Widths
) -> tuple[Fit, ...]:
    """Return projected fits, in the fewest dimensions, a power of two, whose widths are off by at most the tolerance.

    Args:
        spec: The model, and how it is evaluated.
        fits: Exact fits.
        x: The rows that widths are compared on; training rows if None.
        tolerance: The largest |width/exact − 1| on any of these rows.
        seed: Seed for the projection.
        widths: The widths of rows by some fits, or by a calibration with their covariances.
    """
    for fit in fits:
        if not isinstance(fit.covariance, ExactCovariance | EigenbasisCovariance):
            raise ValueError(
                f"compress is for exact fits; one by {fit.engine!r} costs the same however many rows there are already"
            )
        if fit.sandwich is not None:
            raise ValueError("a robust band asks for each direction of the exact fit: compress one without robust=")
    pieces = fits[0].sample.between(0, MEASURED_ROWS).pieces if x is None else (x,)
    pieces = tuple(piece.without_extras() for piece in pieces if len(piece))
    if not pieces:
        raise ValueError(
            "this band has no training rows left to measure widths on: give x=, rows like those to be predicted"
        )
    truth = np.concatenate([widths(fits, piece) for piece in pieces])
    p_star = np.array([fit.effective_parameters for fit in fits])
    needed = 2 * float(np.nan_to_num(p_star).max(initial=FEWEST_DIMENSIONS / 2))
    dim, p, off = 2 ** math.ceil(math.log2(needed)), fits[0].n_parameters, math.inf
    while dim <= min(p - 1, MOST_DIMENSIONS):
        engine = RandomProjection(dim, seed=seed)
        found = tuple(_projected(fit, spec.fitted_network(fit), engine, pieces[0]) for fit in fits)
        error = np.abs(np.concatenate([widths(found, piece) for piece in pieces]) / truth - 1)
        off = float(error.max())
        if off <= tolerance:
            ratios = np.array([fit.effective_parameters for fit in found]) / p_star
            p_error = float(np.nan_to_num(ratios - 1, nan=0.0).max())  # NaN without λ
            report = ErrorReport(float(error.mean()), off, p_error, len(error), repr(engine), measured=True)
            return tuple(replace(fit, error=report) for fit in found)
        dim *= 2
    why = (
        f"{dim // 2:,} dimensions are off by {off:.2%}" if off < math.inf else f"{dim:,} would be needed to begin with"
    )
    raise ValueError(
        f"widths within {tolerance:.2%} of exact would take too many dimensions ({why}): keep the exact band"
    )


def _projected(fit: Fit, network: Network, engine: RandomProjection, x: Inputs) -> Fit:
    accumulator = engine.start(Known(fit.n_rows * fit.gradients_per_row, fit.covariance.damping))
    with plain_autograd(network.device):
        for rows in _rows(fit, network, x):
            accumulator.update(rows)
        return replace(fit, covariance=accumulator.finalise(fit.covariance.damping), engine=engine, n_compared=0)


def _rows(fit: Fit, network: Network, x: Inputs) -> Iterator[GradientBatch]:
    """Yield J; where there is JᵀJ alone, other rows that have the same, in the same parts as gradients are."""
    covariance = fit.covariance
    assert isinstance(covariance, ExactCovariance | EigenbasisCovariance)
    if covariance.J is not None:
        yield from covariance.J.split(CHUNK_ROWS_AT_LEAST)
        return
    spectral = covariance.eigendecomposed()
    assert isinstance(spectral, EigenbasisCovariance)
    (block,) = network.gradients(x[:1], slice(0, 1))[1].blocks
    parts = block.parts()
    rows = torch.from_numpy((spectral.W * np.sqrt(spectral.eigenvalues)).T)
    for some in torch.split(rows, CHUNK_ROWS_AT_LEAST):
        columns = torch.split_with_sizes(some.to(network.device), [part.n_parameters for part in parts], dim=1)
        given = zip(columns, parts, strict=True)
        yield GradientBatch((StoredBlock(tuple(DenseRows(each, weight_shapes(part)) for each, part in given)),))
