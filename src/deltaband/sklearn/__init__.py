"""Intervals for scikit-learn estimators."""

from .estimators import BandRegressor, IntervalRegressor

__all__ = ["BandRegressor", "IntervalRegressor"]
