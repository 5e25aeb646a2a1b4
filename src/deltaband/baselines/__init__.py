"""Other methods for intervals, for comparison: Monte-Carlo dropout, ensembles, mean-variance and quantile networks.

All have `predict(x, level)`. `MCDropout` and `DeepEnsemble` take networks that return a mean, `MeanVarianceEnsemble`
and `QuantileNetwork` networks that were trained to know their noise. Only `calibrate(x, y)`, which the latter two have,
guarantees a coverage.
"""

from .calibrated import MeanVarianceEnsemble as MeanVarianceEnsemble
from .calibrated import QuantileNetwork as QuantileNetwork
from .gaussian import DeepEnsemble as DeepEnsemble
from .gaussian import MCDropout as MCDropout
