"""Measures of the quality of intervals, on rows that the network was not trained on.

Every metric takes the targets `y`, (n,), (n, 1) or (n, m), and the `Intervals` that `predict` returned for the same
rows. For one output and level it returns a float, for several an array: (levels,), (m,) or (m, levels).

Example:
    >>> import numpy as np
    >>> from deltaband import Intervals, metrics
    >>> mean = np.zeros(4)
    >>> metrics.coverage(np.array([0.0, 0.5, -0.5, 2.0]), Intervals(mean, mean - 1, mean + 1, level=0.9))
    0.75
"""

from .conditional import SLAB_ROWS_AT_LEAST as SLAB_ROWS_AT_LEAST
from .conditional import GroupCoverage as GroupCoverage
from .conditional import coverage_by_group as coverage_by_group
from .conditional import worst_slab_coverage as worst_slab_coverage
from .conditional import worst_slabs as worst_slabs
from .forecasts import crps as crps
from .forecasts import pinball_loss as pinball_loss
from .intervals import calibration_error as calibration_error
from .intervals import coverage as coverage
from .intervals import interval_score as interval_score
from .intervals import interval_scores as interval_scores
from .intervals import mean_width as mean_width
from .intervals import width_error_correlation as width_error_correlation
from .labels import LabelScores as LabelScores
from .labels import evaluate_labels as evaluate_labels
from .scores import Scores as Scores
from .scores import evaluate as evaluate
