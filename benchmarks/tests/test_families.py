"""The benchmark of families runs, and says which way gradients come by."""

import pytest

from benchmarks.families import FAMILIES, measured

WAYS = {"perceptron": "3 layers by hooks", "GRU": "2 layers by hooks", "tied": "by torch.func", "loop": "a plain loop"}


@pytest.mark.parametrize("family", WAYS)
def test_a_family_is_measured(family):
    result = measured(FAMILIES[family], 40, 1)
    assert result.measured > 0
    assert WAYS[family] in result.details["way"]
