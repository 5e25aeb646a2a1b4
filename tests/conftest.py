"""Fixtures for all tests."""

import os

# The matrices here are tiny: BLAS threads only wait for each other, for minutes where the machine is busy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch import nn

from tests.support.networks import mlp, regression

# Where networks are trained, a warning that they do not fit their data is an error, as all others are. Elsewhere they
# have random weights, as any will do there: then the warning is right, and not what is tested.
TRAINED = ("test_gotchas", "test_sanity", "test_transforms", "test_documents", "test_scaling")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(name in item.path.relative_to(item.config.rootpath).with_suffix("").parts for name in TRAINED):
            item.add_marker(pytest.mark.filterwarnings("ignore::deltaband.errors.MisfitWarning"))


@pytest.fixture
def model() -> nn.Sequential:
    return mlp()


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    return regression()
