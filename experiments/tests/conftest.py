"""Fixtures for the tests of the experiments."""

import os

# The matrices here are tiny: BLAS threads only wait for each other, for minutes where the machine is busy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from experiments.tests.small_data import small


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Small data sets for the experiments, "first" and "second"."""

    monkeypatch.delenv("DELTABAND_DATA", raising=False)
    small(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def first(folder):
    """The splits of the first of them."""
    from experiments import data
    from experiments.protocol import Protocol

    X, y = data.load("first", folder)
    return Protocol("first", X, y, range(2), folder / "networks", lambda text: None)
