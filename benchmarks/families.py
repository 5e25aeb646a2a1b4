"""What gradients cost for each family of networks, beside an epoch of training: `python -m benchmarks.families`.

Both sides are over the same rows, in turn, in one process: the gradients of each row as a fit takes them, and forward
and backward passes in batches of 64 as training has them. Whole rows, which engines other than the exact dual form
want, and the plain loop of autograd over the rows, which always works, are in the details. What it costs to certify
every batch is measured against the same gradients without. Of the networks in `whole_fits` it is all of `fit`.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from deltaband import DeltabandWarning
from deltaband.data.inputs import Inputs
from deltaband.fitting.fit import checked_gradients
from deltaband.network import checks, per_row
from deltaband.network import network as module
from deltaband.network.model_copy import ModelCopy
from deltaband.network.network import Network

from .measure import Neighbours, Report, Result, gflops, limited_to, race
from .problem import perceptron
from .whole_fits import WHOLE_FITS
from .whole_fits import measured as measured_fit

HERE = Path(__file__).parent
BATCH = 64
LOOPED = 32  # rows that the plain loop is measured on
CERTIFICATE_REPEATS = 5  # times as many as of the rest: it is a smaller difference


class Steps(nn.Module):
    """A layer over the steps of a sequence, and a head on their mean."""

    def __init__(self, layer: nn.Module, features: int, table: nn.Module | None = None) -> None:
        super().__init__()
        self.table, self.layer, self.head = table or nn.Identity(), layer, nn.Linear(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.table(x))
        return self.head((y[0] if isinstance(y, tuple) else y).mean(dim=1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there, self.back, self.head = nn.Embedding(200, 32), nn.Linear(32, 200, bias=False), nn.Linear(200, 1)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.back(self.there(x))).mean(dim=1))


@dataclass(frozen=True)
class Family:
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    parameters: Any = "all"


def _convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, stride=2), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1))


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return Steps(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 32, nn.Embedding(200, 32))


def _weight_normed() -> nn.Module:
    layers = (weight_norm(nn.Linear(20, 100)), nn.Tanh(), weight_norm(nn.Linear(100, 100)), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(100, 1))


def _images(n: int) -> Tensor:
    return torch.randn(n, 3, 32, 32)


def _sequences(n: int) -> Tensor:
    return torch.randn(n, 30, 8)


def _words(n: int) -> Tensor:
    return torch.randint(200, (n, 20))


FAMILIES = {
    "perceptron": Family(lambda: perceptron(20, 100, 100, 1), lambda n: torch.randn(n, 20)),
    "convolutions": Family(_convolutional, _images),
    "convolutions_last_layer": Family(_convolutional, _images, "last"),
    "LSTM": Family(lambda: Steps(nn.LSTM(8, 32, batch_first=True), 32), _sequences),
    "GRU": Family(lambda: Steps(nn.GRU(8, 32, batch_first=True), 32), _sequences),
    "transformer": Family(_transformer, _words),
    "embedding": Family(lambda: Steps(nn.Linear(32, 32), 32, nn.Embedding(1000, 32)), _words),
    "weight_norm": Family(_weight_normed, lambda n: torch.randn(n, 20)),
    "tied": Family(Tied, _words),
    "loop": Family(lambda: nn.Sequential(nn.EmbeddingBag(200, 32, mode="max"), nn.Linear(32, 1)), _words),
}


CASES = [*FAMILIES, *WHOLE_FITS]


class Trusting:
    """A certificate that holds whatever the gradients are, and takes no time."""

    @staticmethod
    def of(*_: Any) -> Trusting:
        return Trusting()

    def holds(self, *_: Any) -> bool:
        return True


@contextmanager
def uncertified() -> Iterator[None]:
    """Gradients as they would be if no batch were certified."""
    certificate, check = module.Certificate, checks.check_batch
    module.Certificate, checks.check_batch = Trusting, lambda *_: None  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        module.Certificate, checks.check_batch = certificate, check  # type: ignore[misc]


def measured(family: Family, n: int, repeats: int) -> tuple[Result, Result]:
    """Return the cost of gradients beside an epoch, and of certifying them beside not doing so."""
    torch.manual_seed(0)
    model, x = family.model(), family.inputs(n)
    network = Network(ModelCopy(model, family.parameters))
    layers = network.probe(x).layers
    network = network.with_layers(layers)
    rows = network.with_layers(None) if network.rows_by_vmap_work(x) else network
    few = network.prepare(x[:LOOPED])

    def gradients(network: Network) -> Callable[[], object]:
        at_once = network.chunk_rows(x)
        return lambda: [list(checked_gradients(network, part, 0)) for part in Inputs.of(x).split(at_once)]

    def trusted() -> None:
        with uncertified():
            gradients(network)()

    def epoch() -> None:
        for part in x.split(BATCH):
            model.zero_grad()
            model(part).square().mean().backward()

    ours, whole, training, looped = race(
        gradients(network),
        gradients(rows),
        epoch,
        lambda: per_row.looped(network, layers.order, few, slice(None)),
        repeats=repeats,
    )
    certified, not_certified = race(gradients(network), trusted, repeats=CERTIFICATE_REPEATS * repeats)
    rest = f"{len(layers.rest)} parameters by {'torch.func' if layers.vmap else 'a plain loop'}"
    details = {
        "p": network.n_parameters,
        "n": n,
        "way": f"{len(layers.batch_dims)} layers by hooks" + (f" and {rest}" if layers.rest else ""),
        "gradients s": ours,
        "epoch s": training,
        "whole rows ×": whole / training,
        "plain loop ×": looped / len(few) * n / training,
    }
    seconds = {"certified s": certified, "not certified s": not_certified}
    return (
        Result("gradients of each row / one epoch of forward and backward", ours / training, details=details),
        Result("gradients certified / not", certified / not_certified, at_most=1.6, details=seconds),
    )


def main() -> None:
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="NAME")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--quick", action="store_true", help="few rows, nothing is written unless --out is given")
    parser.add_argument("--out", type=Path, help="folder for families.json and families.md")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeltabandWarning)
    folder = args.out or (None if args.quick else HERE / "results")
    report = Report(folder, "families", "Gradients of each family of networks", keep=True)  # `--only` renews some rows
    with limited_to(args.threads):
        report.gflops[str(args.threads)] = {t: gflops(getattr(torch, t)) for t in ("float32", "float64")}
        for name in args.only:
            neighbours = Neighbours()
            n, repeats = (128, 1) if args.quick else (args.rows, 3)
            results: tuple[Result, ...]
            if name in FAMILIES:
                results = measured(FAMILIES[name], n, repeats)
            else:
                results = (measured_fit(WHOLE_FITS[name], n, repeats),)
            for label, result in zip((name, f"{name}_certificate"), results, strict=False):
                result.details["other processes' cores"] = neighbours.cores()
                report.add(label, args.threads, result)


if __name__ == "__main__":
    main()
