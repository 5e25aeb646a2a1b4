"""Conformal calibration on the delta method's scale."""
