"""The benchmark of families runs, and says which way gradients come by."""

import pytest
import torch

from benchmarks.families import FAMILIES, measured, uncertified
from benchmarks.whole_fits import WHOLE_FITS
from benchmarks.whole_fits import measured as measured_fit
from deltaband.network.checks import Certificate
from deltaband.network.network import Network

WAYS = {"perceptron": "3 layers by hooks", "GRU": "2 layers by hooks", "tied": "by torch.func", "loop": "a plain loop"}


@pytest.mark.parametrize("family", WAYS)
def test_a_family_is_measured(family):
    result, certificate = measured(FAMILIES[family], 40, 1)
    assert result.measured > 0
    assert certificate.measured > 0
    assert WAYS[family] in result.details["way"]


@pytest.mark.parametrize("name", WHOLE_FITS)
@pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
def test_a_whole_fit_is_measured(name):
    result = measured_fit(WHOLE_FITS[name], 40, 1)
    assert result.measured > 0
    assert result.details["n"] == 40
    assert "by hooks" in result.details["way"]
    assert ("probes" in result.details) == (name in ("classes_1000", "labels_200"))


def test_nothing_is_certified_for_comparison_and_everything_afterwards(monkeypatch):
    network, x, certified = Network(torch.nn.Linear(3, 1)), torch.randn(6, 3), []
    network = network.with_layers(network.probe(x).layers)
    holds = Certificate.holds
    monkeypatch.setattr(Certificate, "holds", lambda self, *given: certified.append(given) or holds(self, *given))
    with uncertified():
        network.gradients(x)
    assert certified == []
    network.gradients(x)
    assert len(certified) == 1
