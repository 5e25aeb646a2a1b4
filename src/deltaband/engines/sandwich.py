"""The covariance of the weights as the residuals themselves show it: HC0 to HC3, and clustered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..network.gradient_batch import GradientBatch
from ..storage.encoding import storable
from .covariance import Products
from .spectral import SpectralCovariance

LARGEST_LEVERAGE = 1 - 1e-9  # of a training row that HC2 and HC3 have an answer for


@storable
@dataclass(frozen=True, eq=False)
class Sandwich:
    """With the residual eᵢ of each row, adjusted as `kind` says, and the rows of a cluster c, or each row alone:

    q = gᵀA⁻¹MA⁻¹g,  M = Σ_c s_c s_cᵀ,  s_c = Σ_{i∈c} eᵢgᵢ,    in units of the square of the target.

    The residuals are multiplied by 1 (HC0, HC1), 1/√(1 − hᵢ) (HC2) or 1/(1 − hᵢ) (HC3). HC1 multiplies M by n/(n − p*),
    with G clusters by G/(G − 1)·(n − 1)/(n − p*).
    """

    kind: str  # "HC0" to "HC3"
    matrix: np.ndarray  # (r, r) VᵀA⁻¹MA⁻¹V, in the directions V of the fit's covariance
    n_clusters: int | None  # None: each row is one

    @staticmethod
    def adjusted(kind: str, h: np.ndarray) -> np.ndarray:
        """Return the factors of residuals of rows of these leverages, all below 1."""
        return 1 / np.sqrt(1 - h) if kind == "HC2" else 1 / (1 - h) if kind == "HC3" else np.ones_like(h)

    @classmethod
    def of(
        cls, kind: str, covariance: SpectralCovariance, gram: np.ndarray, n: int, n_clusters: int | None
    ) -> Sandwich:
        """Return the sandwich of VᵀMV, given in an upper triangle and without the factor of HC1, over n rows of J."""
        inverses, factor = covariance.inverses, 1.0
        if kind == "HC1":
            freedom = n - covariance.effective_parameters
            factor = n if n_clusters is None else n_clusters / (n_clusters - 1) * (n - 1)
            factor = factor / freedom if freedom > 0 else np.nan
        whole = np.triu(gram) + np.triu(gram, 1).T
        return cls(kind, factor * inverses[:, None] * whole * inverses, n_clusters)

    def variance(self, covariance: SpectralCovariance, g: GradientBatch) -> np.ndarray:  # (b,)
        """Return q of rows; `covariance` has the directions."""
        z = covariance.projections(g)
        return np.maximum(np.einsum("bi,bi->b", z @ self.matrix, z), 0.0)

    def across(self, covariance: SpectralCovariance, other: GradientBatch) -> Products:
        """Return the function of rows g that returns gᵀA⁻¹MA⁻¹g' for each row g' of another batch."""
        right = self.matrix @ covariance.projections(other).T
        return lambda g: covariance.projections(g) @ right

    def describe(self) -> str:
        clusters = "" if self.n_clusters is None else f" over {self.n_clusters:,} clusters"
        return f"robust {self.kind}{clusters}"
