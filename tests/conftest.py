"""Fixtures for all tests."""

import os

# The matrices here are tiny: BLAS threads only wait for each other, for minutes where the machine is busy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch import nn

from tests.support.networks import mlp, regression


@pytest.fixture
def model() -> nn.Sequential:
    return mlp()


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    return regression()
