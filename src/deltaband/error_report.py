"""`ErrorReport`, which says how exact widths are."""

import math
from dataclasses import dataclass

from .storage.encoding import storable


@storable
@dataclass(frozen=True)
class ErrorReport:
    """Relative errors of an approximate engine against the exact method, estimated on training rows, or measured.

    Attributes:
        width: Mean of |width/exact − 1|.
        largest: Largest |width/exact − 1| over the rows compared.
        effective_parameters: p*/exact − 1.
        n_rows: Rows of the sample; 0 where the fit is exact.
        engine: The engine as it was fitted to the sample.
        measured: Whether the exact fit to all rows was there to compare with, as in `compress`.
        probes: The part due to combinations of many outputs, `probes=`; 0 where each has its gradients.
    """

    width: float
    largest: float
    effective_parameters: float
    n_rows: int
    engine: str
    measured: bool = False
    probes: float = 0.0

    def __str__(self) -> str:
        also = f"; random combinations of the outputs make them off by {self.probes:.2%}" if self.probes else ""
        if self.n_rows == 0:
            return f"exact: there is nothing to estimate{also}"
        if math.isnan(self.effective_parameters):
            return f"widths are too small by an unknown amount: λ is out of reach of {self.engine}"
        return (
            f"widths are off by {self.width:.2%} on average and {self.largest:.2%} at most, p* by "
            f"{self.effective_parameters:+.2%} ({self.engine} against Exact() on {self.n_rows:,} "
            f"{'rows' if self.measured else 'training rows'}){also}"
        )
