"""What a fit keeps of its training rows' leverages: how they share p*, and from which on a new row is far from them."""

from dataclasses import replace

import numpy as np

from ..data.row_record import Sample
from ..network.gradient_batch import GradientBatch
from ..network.network import Network
from .fit import Fit, evaluate_sample

FAR_QUANTILE = 0.95  # of leverages of training rows: new rows above it are far from them


def left_out(h: np.ndarray) -> np.ndarray:
    """Return the leverages h/(1 − h) that training rows would have if they were left out of the fit."""
    return h / np.maximum(1 - h, np.finfo(np.float64).eps)


def with_leverages(fit: Fit, network: Network, rows: Sample, exact: bool) -> Fit:
    """Add, from some training rows, their h where it is exact, that of rows that are far, and the parts of p*.

    Of a fit with probes it is the mean h of each row's outputs, by other combinations than those in J, and all outputs
    have the same part of p*.
    """
    covariance, probes = fit.reference, fit.probes
    if probes is not None:
        fresh = network.with_probes(replace(probes, seed=probes.seed + 1))
        of_rows = evaluate_sample(fresh, rows, covariance.leverage, fit.rows_at_once).sum(axis=1, keepdims=True)
        far = np.quantile(of_rows / _weights(fit, rows).sum(axis=1, keepdims=True), FAR_QUANTILE, axis=0)
        return replace(fit, shares=np.full(fit.n_outputs, 1 / fit.n_outputs), far=far)
    if fit.n_outputs == 1:
        h, shares = evaluate_sample(network, rows, covariance.leverage, fit.rows_at_once), fit.shares
    else:

        def leverage_and_variance(g: GradientBatch) -> np.ndarray:
            return np.stack([covariance.leverage(g), covariance.variance(g)], axis=1)

        values = evaluate_sample(network, rows, leverage_and_variance, fit.rows_at_once)  # (rows, m, 2)
        h, q = values[:, :, 0], values[:, :, 1]
        own = np.maximum(2 * h - q, 0.0).sum(axis=0)  # of the diagonal of 2H − H²
        shares = own / own.sum() if own.sum() > 0 else np.full(len(own), 1 / len(own))
    # of a row that is left out of the training rows it is h/(1 − h); new rows have weight 1
    w = _weights(fit, rows)
    of_new = np.divide(left_out(h) if exact else h, w, out=np.full(h.shape, np.nan), where=w > 0)
    far = np.nan_to_num(np.nanquantile(of_new, FAR_QUANTILE, axis=0), nan=np.inf)
    plain = exact and not any("given" in piece.extras for piece in rows.pieces)
    return replace(fit, shares=shares, far=far, leverages=h if plain else fit.leverages)


def _weights(fit: Fit, rows: Sample) -> np.ndarray:  # (rows, m)
    """Return the weights that the user gave rows, 1 where there are none."""
    given = [piece.extras.get("given") for piece in rows.pieces]
    shapes = [(len(piece), fit.n_outputs) for piece in rows.pieces]
    pairs = zip(given, shapes, strict=True)
    return np.concatenate([np.broadcast_to(1.0 if w is None else w.numpy(), shape) for w, shape in pairs])
