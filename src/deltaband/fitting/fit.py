"""`Fit`, the result of a pass over the training rows; what it says about rows, and the formula that bounds them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from ..damping import TYPICAL_RELATIVE_DAMPING
from ..data.inputs import Inputs, Ranges, check_finite
from ..data.row_record import Sample, SeenRows
from ..engines import Covariance, Engine, SpectralCovariance, Spectrum
from ..engines.sandwich import Sandwich
from ..error_report import ErrorReport
from ..errors import ChangedShapeError
from ..machine import on_free_cores
from ..network.gradient_batch import PRODUCT_ROWS, GradientBatch, RowBuffer
from ..network.layers.hooks import Layers
from ..network.network import Network, plain_autograd
from ..network.probes import PROBE_ERROR, ProbeError, Probes
from ..results import Side, two_bounds
from ..storage.encoding import storable

FAR_QUANTILE = 0.95  # of leverages of training rows: new rows above it are far from them
ADVICE = "look at the scale of that row, and for NaN among the weights"
N_ROWS_TO_JUDGE, MANY_ROWS = 8, 256  # whether the network fits; evaluation takes longer than a look at the machine
TOLERABLE_WIDTH_ERROR = 0.05
QUICK_SPECTRUM_SIZE = 1_000  # eigenvalues that take a moment

Outputs = tuple[int, ...]  # numbers of outputs of the network
Bounds = tuple[np.ndarray, np.ndarray]  # lower and upper, of y − ŷ
RowFunction = Callable[[GradientBatch], np.ndarray]  # gradients of b rows -> (b, …)


@storable
@dataclass(frozen=True)
class Fit:
    """All results of one fit: the covariance, and what is known of the training rows."""

    covariance: Covariance  # without a λ if none was given
    engine: Engine  # the settings it was made with
    losses: np.ndarray  # (m,) summed over the rows: squared residuals, or −log π for a classifier
    counts: np.ndarray  # what the task counts over the rows
    n_rows: int
    n_parameters: int
    dtype: torch.dtype
    fingerprint: dict[str, str]
    layers: Layers
    by_rows: bool  # whether the covariance asks for rows, not for inner products
    seen: SeenRows
    ranges: Ranges  # of the inputs
    outputs: tuple[int, ...] = (0,)  # the outputs of the network that it is for
    n_returned: int = 1  # how many outputs the network has
    shape: tuple[int, ...] = ()  # that of what it returns for a row, where it is known
    probes: Probes | None = None  # the combinations of outputs that J is of, where it is not of the outputs
    probe_error: ProbeError | None = None  # where there are some, and λ is known
    total_weight: float = (
        0.0  # of the rows, the mean over outputs; n_rows where they have none and no target is missing
    )
    n_targets: np.ndarray | None = None  # (m,) how many rows have a target, where some are missing
    shares: np.ndarray = field(default_factory=lambda: np.ones(1))  # (m,) the share of p* of each output
    leverages: np.ndarray = field(default_factory=lambda: np.zeros((0, 1)))  # (rows, m) if exact, without weights
    far: np.ndarray = field(default_factory=lambda: np.zeros(0))  # (m,) the leverage from which on a new row is far
    sample: Sample = field(default_factory=Sample)  # inputs of training rows, in random order
    residuals: Sample = field(default_factory=Sample)  # features, outputs, |residuals| and √weights of training rows
    uncertified: tuple[str, ...] = ()  # parameters of which some batch has needed rows of plain autograd
    n_compared: int = 0  # how many of them a comparison with the exact method may take; 0 where exact
    exact_cost: str = ""  # what the exact method would cost, where "auto" has chosen another
    error: ErrorReport | None = None  # where λ is known and there are enough rows; none where exact
    rows_at_once: int = 0  # how many rows to evaluate together, where that saves work
    format: Inputs | None = None  # that of the training rows, without any
    sandwich: Sandwich | None = None  # the robust covariance, in the directions of the other one, which is spectral

    @property
    def asked_layers(self) -> Layers | None:
        """Return the layers that gradients for this covariance come by; None for whole rows."""
        return None if self.by_rows else self.layers

    @property
    def effective_parameters(self) -> float:
        """Return p*; NaN where λ is not known."""
        return math.nan if self.covariance.damping is None else self.covariance.effective_parameters

    @property
    def reference(self) -> Covariance:
        """Return the covariance that leverages are compared under: at the λ of the fit, or at a common one."""
        if self.covariance.damping is not None:
            return self.covariance
        spectral = self.covariance.eigendecomposed()
        return spectral.at(TYPICAL_RELATIVE_DAMPING * float(spectral.eigenvalues.max(initial=0.0)))

    @property
    def n_outputs(self) -> int:
        return len(self.losses)

    @property
    def observed(self) -> np.ndarray:  # (m,), how many rows have a target
        return np.full(self.n_outputs, float(self.n_rows)) if self.n_targets is None else self.n_targets

    @property
    def gradients_per_row(self) -> int:
        """How many rows of J there are for each training row."""
        return self.n_outputs if self.probes is None else self.probes.count

    @property
    def degrees_of_freedom(self) -> np.ndarray:  # (m,)
        return self.observed - self.effective_parameters * self.shares

    @property
    def noise_std(self) -> np.ndarray:  # (m,)
        """Return s = √(RSS/(n − p*)) of each output; NaN where n − p* ≤ 0."""
        nu = self.degrees_of_freedom
        return np.sqrt(self.losses / np.where(nu > 0, nu, np.nan))

    def half_width(self, level: float, side: Side = "both") -> np.ndarray:  # (m,)
        """Return t·s, an interval's half width divided by √(1 + q)."""
        from scipy.special import stdtrit

        return stdtrit(self.t_freedom, (1 + level) / 2 if side == "both" else level) * self.noise_std

    @property
    def t_freedom(self) -> np.ndarray:  # (m,)
        """Return the degrees of freedom of the interval's t: n − p*, with G clusters G − 1."""
        n_clusters = None if self.sandwich is None else self.sandwich.n_clusters
        return self.degrees_of_freedom if n_clusters is None else np.full(self.n_outputs, n_clusters - 1.0)

    def variance(self, g: GradientBatch) -> np.ndarray:  # (b,)
        """Return q of rows by the formula, in units of 1/`variance_factors`."""
        if self.sandwich is None:
            return self.covariance.variance(g)
        assert isinstance(self.covariance, SpectralCovariance)
        return self.sandwich.variance(self.covariance, g)

    @property
    def variance_factors(self) -> np.ndarray:  # (m,)
        """Return what makes q of each output a multiple of s²: 1/s² where it is robust, and 1 elsewhere."""
        if self.sandwich is None:
            return np.ones(self.n_outputs)
        s2 = np.square(self.noise_std)
        return np.divide(1.0, s2, out=np.zeros_like(s2), where=s2 != 0)  # without residuals q is zero, too

    def inaccuracies(self, tolerable_missed: float, found: str) -> list[str]:
        """Return warnings if there are too few combinations of outputs, and if the engine's error is too large: its
        estimate, or its bound where there is none."""
        off = self.probe_error
        few = [] if off is None or off.width <= PROBE_ERROR else [off.advice(PROBE_ERROR, self.n_outputs)]
        return [*few, *self._of_engine(tolerable_missed, found)]

    def _of_engine(self, tolerable_missed: float, found: str) -> list[str]:
        advice = "raise its rank, dim or landmarks, or use Exact() if memory allows"
        if self.error is not None:
            bad = self.error.width > TOLERABLE_WIDTH_ERROR
            return [f"{self.engine!r} is not accurate enough here: {self.error}; {advice}"] if bad else []
        missed = self.covariance.missed_parameters
        if missed <= tolerable_missed:
            return []
        return [f"the sketch may miss up to {missed:.0f} effective parameters (it found {found}): {advice}"]

    def quick_spectrum(self) -> Spectrum | None:
        """Return the spectrum if it takes a moment only, else None."""
        known = isinstance(self.covariance, SpectralCovariance)
        size = min(self.n_rows * self.gradients_per_row, self.n_parameters)
        if self.covariance.damping is None or not (known or size <= QUICK_SPECTRUM_SIZE):
            return None
        try:
            return self.covariance.spectrum()
        except (ArithmeticError, MemoryError, np.linalg.LinAlgError, ValueError):  # showing a band must not fail
            return None


def evaluate_rows(
    network: Network,
    X: Inputs,
    function: RowFunction,
    rows_at_once: int = 0,  # of J; 0: as many as save work
    first: int = 0,  # the number of the first row in the data
) -> tuple[np.ndarray, np.ndarray]:
    """Return the network's outputs (n, m) in float64 and the function's value for each of them, (n, m, …).

    With a network that has r probes the values are those of the combinations, (n, r, …).
    """
    outputs: list[Tensor] = []
    values: list[np.ndarray] = []
    buffer = RowBuffer(lambda gradients: values.append(function(gradients)), rows_at_once or PRODUCT_ROWS)
    with plain_autograd(network.device), on_free_cores() if len(X) >= MANY_ROWS else nullcontext():
        rows = network.chunk_rows(X)
        if rows_at_once:
            rows = max(1, min(rows, rows_at_once // network.gradients_per_row(X)))
        for x in X.split(rows):
            parts = []
            for part, gradients in checked_gradients(network, x, first):
                parts.append(part)
                buffer.add(gradients)
            outputs.append(torch.cat(parts, dim=1))
            first += len(x)
        buffer.flush()
    flat, start, ordered = np.concatenate(values), 0, []
    m = network.gradients_per_row(X)
    for b in map(len, outputs):  # the first output of all rows of a chunk, then the second
        ordered.append(flat[start : start + b * m].reshape(m, b, *flat.shape[1:]).swapaxes(0, 1))
        start += b * m
    return torch.cat(outputs).cpu().double().numpy(), np.concatenate(ordered)


def evaluate_sample(network: Network, sample: Sample, function: RowFunction, rows_at_once: int = 0) -> np.ndarray:
    """Return the function's values for the rows of a sample, (n, m, …), piece by piece."""
    return np.concatenate([evaluate_rows(network, x, function, rows_at_once)[1] for x in sample.pieces])


def left_out(h: np.ndarray) -> np.ndarray:
    """Return the leverages h/(1 − h) that training rows would have if they were left out of the fit."""
    return h / np.maximum(1 - h, np.finfo(np.float64).eps)


def with_leverages(fit: Fit, network: Network, rows: Sample, exact: bool) -> Fit:
    """Add the h of some training rows, or of all, where it is exact, that of rows that are far, and the parts of p*.

    Of a fit with probes it is the mean h of each row's outputs, by other combinations than those in J, and all outputs
    have the same part of p*.
    """
    covariance, probes = fit.reference, fit.probes
    if probes is not None:
        fresh = network.with_probes(replace(probes, seed=probes.seed + 1))
        of_rows = evaluate_sample(fresh, rows, covariance.leverage, fit.rows_at_once).sum(axis=1, keepdims=True)
        far = np.quantile(of_rows / _weights(fit, rows).sum(axis=1, keepdims=True), FAR_QUANTILE, axis=0)
        return replace(fit, shares=np.full(fit.n_outputs, 1 / fit.n_outputs), far=far)
    plain, shares = not any("given" in piece.extras for piece in rows.pieces), fit.shares
    if fit.n_outputs == 1:
        own = covariance.own_leverages if plain else None
        h = evaluate_sample(network, rows, covariance.leverage, fit.rows_at_once) if own is None else own[:, None]
    else:

        def leverage_and_variance(g: GradientBatch) -> np.ndarray:
            return np.stack([covariance.leverage(g), covariance.variance(g)], axis=1)

        h, q = np.moveaxis(evaluate_sample(network, rows, leverage_and_variance, fit.rows_at_once), 2, 0)
        own = np.maximum(2 * h - q, 0.0).sum(axis=0)  # of the diagonal of 2H − H²
        shares = own / own.sum() if own.sum() > 0 else np.full(len(own), 1 / len(own))
    # of a row that is left out of the training rows it is h/(1 − h); new rows have weight 1
    w = np.ones(h.shape) if plain else _weights(fit, rows)
    of_new = np.divide(left_out(h) if exact else h, w, out=np.full(h.shape, np.nan), where=w > 0)
    far = np.nan_to_num(np.nanquantile(of_new, FAR_QUANTILE, axis=0), nan=np.inf)
    return replace(fit, shares=shares, far=far, leverages=h if exact and plain else fit.leverages)


def _weights(fit: Fit, rows: Sample) -> np.ndarray:  # (rows, m)
    """Return the weights that the user gave rows, 1 where there are none."""
    given = [piece.extras.get("given") for piece in rows.pieces]
    shapes = [(len(piece), fit.n_outputs) for piece in rows.pieces]
    pairs = zip(given, shapes, strict=True)
    return np.concatenate([np.broadcast_to(1.0 if w is None else w.numpy(), shape) for w, shape in pairs])


def checked_gradients(network: Network, x: Inputs, first: int) -> Iterator[tuple[Tensor, GradientBatch]]:
    """Yield outputs and gradients, all finite, for some of the outputs at a time; `first` numbers the first row."""
    for group in network.groups(x):
        try:
            outputs, gradients = network.gradients(x, group)
        except ChangedShapeError as error:
            raise ChangedShapeError(f"rows {first} to {first + len(x) - 1}: {error}") from None
        check_outputs(outputs, first)
        if not gradients.surely_finite:
            norms = torch.from_numpy(gradients.squared_norms).reshape(-1, len(x)).T
            check_finite(norms, "the network's gradients", first, ADVICE)
        yield outputs, gradients


def check_outputs(outputs: Tensor, first: int = 0) -> None:
    """Raise if an output is not finite, and name the row."""
    check_finite(outputs, "the network's outputs", first, ADVICE)


class Reference(NamedTuple):
    """What a target is compared with: its prediction, and the noise that is known, σ(x)/√w.

    A network that predicts quantiles has their middle, their centre, and half of their distance.
    """

    mean: np.ndarray  # (b, m)
    centre: np.ndarray  # (b, m)
    unit: np.ndarray  # (b, m)
    crossed: int = 0  # how many rows have quantiles in the wrong order


class KnownRows(NamedTuple):
    """What the bounds of rows follow from."""

    q: Sequence[np.ndarray]  # for each output, in units of the square of the noise that is known
    unit: np.ndarray  # (n, m) that noise
    far: np.ndarray | None = None  # (n,) bool, where that is known
    place: np.ndarray | None = None  # (n, k) what their quantile depends on, where that is known
    leverage: np.ndarray | None = None  # (n, m) likewise


class Method(Protocol):
    """What intervals follow from: the formula, or a calibration."""

    @property
    def weighted(self) -> bool: ...  # whether rows may have weights

    @property
    def row_functions(self) -> list[RowFunction]: ...  # for each fit, of gradients: what `known` needs

    def known(
        self, network: Callable[[], Network], x: Inputs, to: Reference, found: Sequence[np.ndarray]
    ) -> KnownRows: ...


def in_units_of_noise(fits: Sequence[Fit], q: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return q of each output, as the fits' own `variance` gives it, in units of s²."""
    factors = np.concatenate([fit.variance_factors for fit in fits])
    return [factor * each for factor, each in zip(factors, q, strict=True)]


@dataclass(frozen=True)
class Formula:
    """ŷ ± t·s·√(u² + q) with u the noise that is known, mostly 1; without noise, of the regression function, t·s·√q."""

    fits: Sequence[Fit]
    noise: bool = True
    weighted: ClassVar[bool] = True

    def checked(self) -> Self:
        """Raise where the formula has no answer."""
        freedom = min(float(fit.degrees_of_freedom.min()) for fit in self.fits)
        if freedom > 0:
            return self
        raise ValueError(
            f"n − p* = {freedom:.3g} leaves no degrees of freedom for the noise: the formula has no answer for this "
            "network. Raise the damping, or calibrate on held-out data"
        )

    @property
    def row_functions(self) -> list[RowFunction]:
        return [fit.variance for fit in self.fits]

    def known(self, network: Callable[[], Network], x: Inputs, to: Reference, found: Sequence[np.ndarray]) -> KnownRows:
        return KnownRows(in_units_of_noise(self.fits, found), to.unit)

    def scale(self, rows: KnownRows) -> np.ndarray:  # (n, m)
        return rows.unit * np.sqrt(np.stack(rows.q, axis=1) + float(self.noise))

    def bounds(self, rows: KnownRows, levels: Sequence[float], side: Side) -> Bounds:  # (n, m, levels) each
        """Return bounds of y − ŷ."""
        factors = [np.concatenate([fit.half_width(each, side) for fit in self.fits]) for each in levels]  # each (m,)
        return two_bounds(np.stack([self.scale(rows) * each for each in factors], axis=2), side)
