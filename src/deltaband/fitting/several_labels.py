"""What classification does in a fit where a row may have several labels, or none: each is true or not by itself."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.special import entr

from ..data.labels import check_several_labels, refuse_ragged_labels
from ..network.log_odds import own_fisher
from ..network.network import Head
from .classes import Classification
from .fit import Fit, Outputs, check_outputs


@dataclass(frozen=True)
class SeveralLabels(Classification):
    """Binary cross-entropy: the Fisher matrix is Σ π_l(1 − π_l) ∇z_l ∇z_lᵀ over rows and labels."""

    loss: ClassVar[str] = "bce"
    methods: ClassVar[tuple[str, ...]] = ("lac",)
    several: ClassVar[bool] = True

    def n_labels(self, n_returned: int) -> int:
        return n_returned

    def is_binary(self, n_returned: int) -> bool:
        return False

    def log_odds(self, z: Tensor) -> Tensor:
        return z

    def head(self, outputs: Outputs) -> Head:
        return (lambda z: own_fisher(z[:, list(outputs)])) if self.per_output else own_fisher

    def check_raw_targets(self, y: Any) -> None:
        super().check_raw_targets(y)
        refuse_ragged_labels(y)

    def check_targets(self, targets: Tensor, n_returned: int) -> None:
        check_several_labels(targets, n_returned)

    def check_first_rows(self, y: Tensor, targets: Tensor) -> None:
        check_outputs(y)
        check_several_labels(targets, y.shape[1])

    def n_counts(self, n_outputs: int, n_returned: int) -> int:
        return 2 + n_outputs

    def losses(
        self, outputs: Outputs, y: Tensor, targets: Tensor, n_returned: int, weight: Tensor | None
    ) -> tuple[Tensor, np.ndarray]:
        """Return the losses of each row and label, and the share of labels that are right, how many scores lie outside
        [0, 1], and the weight of the rows that have each label, summed over the rows."""
        truth, s = check_several_labels(targets, n_returned), y.double()
        truth = truth if s.shape[1] == n_returned else truth[:, list(outputs)]
        outside = float(((s < 0) | (s > 1)).sum())
        right = float(((s > 0) == truth).double().mean(dim=1).sum())
        losses = -logsigmoid(torch.where(truth, s, -s))
        w = torch.ones(len(truth), 1, dtype=torch.float64) if weight is None else weight.double()
        counts = np.array([right, outside, *(truth * w).sum(dim=0).tolist()])
        return losses if weight is None else losses * weight, counts

    def entropy(self, fit: Fit) -> float:
        share = torch.from_numpy(fit.counts[2:] / fit.total_weight).clamp(0, 1)
        return float((entr(share) + entr(1 - share)).sum()) * fit.total_weight

    def rows_per_label(self, fit: Fit) -> int:
        return fit.n_outputs
