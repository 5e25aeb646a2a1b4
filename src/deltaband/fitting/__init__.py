"""Data, network and engine to a fit."""
