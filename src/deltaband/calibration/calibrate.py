"""The pass over the calibration data: fits and held-out rows in, a `Calibration` out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from ..data.batches import Batches
from ..data.row_record import pair_hashes
from ..engines import Covariance
from ..fitting.evaluate import ask
from ..fitting.fit import Fit
from ..metrics import interval_scores
from ..network.gradient_batch import GradientBatch
from ..network.network import Network
from .conformal import (
    AllOutputs,
    Calibration,
    ConformalScale,
    EachOutput,
    Scales,
    cross_calibrated_score,
    drift,
    scale_variances,
)

Residuals = Callable[[np.ndarray, Tensor], np.ndarray]  # outputs (b, m), targets -> (b, m)


def calibrated(
    fits: Sequence[Fit],
    networks: Sequence[Network],  # one for each
    batches: Batches,
    residuals: Residuals,
    *,
    tune: bool,
    joint: bool,
    seed: int,
) -> Calibration:
    covariances, scales = zip(*(_scales(fit, tune) for fit in fits), strict=True)
    r, answers, hashes = _pass(fits, networks, batches, residuals, covariances, scales)
    formula, h, q = zip(*((of_output[:, 0], of_output[:, 1], of_output[:, 2:]) for of_output in answers), strict=True)
    of_outputs = [of_fit for fit, of_fit in zip(fits, scales, strict=True) for _ in range(fit.n_outputs)]
    n, m = r.shape
    conformal: EachOutput | AllOutputs
    if joint:
        conformal, after = AllOutputs(r, q, of_outputs, seed), np.nan
    else:
        conformal = EachOutput([ConformalScale(r[:, o], q[o], of_outputs[o]) for o in range(m)])
        after = float(np.mean([cross_calibrated_score(r[:, o], q[o], of_outputs[o], seed) for o in range(m)]))
    half = np.concatenate([fit.student(0.95) for fit in fits]) * np.sqrt(1 + np.stack(formula, axis=1))
    training = [fit.leverages[:, o] for fit in fits for o in range(fit.n_outputs) if fit.leverages.shape[0]]
    p_values = [drift(training[o], h[o]) for o in range(len(training))]
    return Calibration(
        covariances,
        scales,
        conformal,
        score_before=float(interval_scores(r, -half, half, 0.95).mean()),
        score_after=after,
        drift=min(1.0, m * min(p_values)) if p_values else np.nan,  # Bonferroni: there are m tests
        seen=fits[0].seen.share(hashes),
        repeated=fits[0].seen.repeated,
        n_rows=n,
    )


def _pass(
    fits: Sequence[Fit],
    networks: Sequence[Network],
    batches: Batches,
    residuals: Residuals,
    covariances: Sequence[Covariance],
    scales: Sequence[Scales],
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Residuals (n, m), what is asked of each output's rows, (n, 2 + L), and hashes (n,)."""
    questions = [_question(*of_fit) for of_fit in zip(fits, covariances, scales, strict=True)]
    parts = []
    for x, targets, first in batches.chunks(lambda x: max(networks[0].chunk_rows(x), fits[0].rows_at_once)):
        asked = [
            ask(network, x, question, fit.rows_at_once, first)
            for fit, network, question in zip(fits, networks, questions, strict=True)
        ]
        r = residuals(np.concatenate([outputs for outputs, _ in asked], axis=1), targets)
        answers = [answer[:, o] for _, answer in asked for o in range(answer.shape[1])]
        parts.append((r, pair_hashes(networks[0].prepare(x), targets), *answers))
    if not parts:
        raise ValueError("the calibration data are empty (a generator can be read only once)")
    r, hashes, *answers = (np.concatenate(part) for part in zip(*parts, strict=True))
    return r, answers, hashes


def _question(fit: Fit, covariance: Covariance, scales: Scales) -> Callable[[GradientBatch], np.ndarray]:
    """q by the formula, the leverage, and q under every λ of the scales."""
    reference = fit.reference

    def question(g: GradientBatch) -> np.ndarray:  # (b, 2 + L)
        formula = np.full(len(g), np.nan) if fit.covariance.damping is None else fit.covariance.variance(g)
        return np.column_stack([formula, reference.leverage(g), scale_variances(covariance, scales, g)])

    return question


def _scales(fit: Fit, tune: bool) -> tuple[Covariance, Scales]:
    if tune:
        spectral = fit.covariance.diagonalised()
        return spectral, Scales.grid(spectral.eigenvalues, fit.n_rows * fit.n_outputs)
    if fit.covariance.damping is None:
        raise ValueError("tune=False takes λ from the fit, which has none: give weight_decay or damping, or tune")
    return fit.covariance, Scales.single(fit.covariance.damping)
