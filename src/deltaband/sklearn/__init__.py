"""Intervals for scikit-learn estimators."""

from .estimators import *  # noqa: F403
