"""A report on the quality of prediction intervals, as one HTML file that needs nothing else."""

from .page import page, write

__all__ = ["page", "write"]
