"""Covariances as tensor operations: coordinates of gradients, and what follows from their squares.

Every covariance answers by its eigendecomposition: with z = (vⱼ·g) and ρ = g·g − Σz², q for every λ and h are linear in
(z², ρ). What differs is how z comes from the parts of a gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..engines import Covariance, SpectralCovariance
from ..engines.nystrom import NystromCovariance
from ..engines.projection import Equivalent, ProjectedCovariance
from ..engines.spectral import EigenbasisCovariance, SketchedCovariance, sigma
from ..errors import ExportError
from ..machine import free_memory
from ..network.gradient_batch import GradientBatch
from ..network.layers.factors import OuterProducts, Part, stacked
from ..network.layers.projection import COLUMNS_AT_ONCE, Entries, Projection, Weight
from .gradients import Shape

PROBED_NUMBERS = 2**22  # of unit vectors that an engine of one's own is asked about at once

Sizes = dict[str, torch.Size]  # of parameters, in the order of the columns of J


class Coordinates(nn.Module):
    """z (n, r), and ρ (n,), of the gradients of n rows."""

    def forward(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class Directions(Coordinates):
    """z = Vᵀg with the directions V as a dense matrix."""

    def __init__(self, V: Tensor, shapes: Sequence[Shape], sizes: Sizes) -> None:  # (p, r)
        super().__init__()
        self.n_parts = len(shapes)
        for i, index in enumerate(columns_of(shapes, sizes)):
            self.register_buffer(f"directions_{i}", V[index].contiguous())

    def forward(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        directions = [getattr(self, f"directions_{i}") for i in range(self.n_parts)]
        rows = [part.rows().to(V.dtype) for part, V in zip(parts, directions, strict=True)]
        z = torch.stack([g @ V for g, V in zip(rows, directions, strict=True)]).sum(dim=0)
        if z.dtype == torch.float64:
            return z, _rest(torch.stack([g.square().sum(dim=1) for g in rows]).sum(dim=0), z)
        # in single precision ρ is the norm of a difference, not the difference of two norms, which would be rounding
        rest = [(g - z @ V.T).double().square().sum(dim=1) for g, V in zip(rows, directions, strict=True)]
        return z.double(), torch.stack(rest).sum(dim=0)


class Kernel(Coordinates):
    """z = Tᵀ(Jg) with some rows J, layer by layer: products of factors where those of the rows are known."""

    T: Tensor

    def __init__(self, J: GradientBatch, T: Tensor, shapes: Sequence[Shape]) -> None:  # (n, r)
        super().__init__()
        theirs = [stacked(parts) for parts in zip(*(block.parts() for block in J.merged().blocks), strict=True)]
        self.register_buffer("T", T)
        self.factored: list[bool] = []
        for i, (part, shape) in enumerate(zip(theirs, shapes, strict=True)):
            factored = isinstance(part, OuterProducts) and shape.is_outer_product
            self.factored.append(factored)
            if factored:
                assert isinstance(part, OuterProducts)
                self.register_buffer(f"delta_{i}", part.delta[:, 0].double().T.contiguous())  # (o, n)
                self.register_buffer(f"x_{i}", part.x[:, 0].double().T.contiguous())
            else:
                self.register_buffer(f"directions_{i}", part.rows().double().T @ T)  # (p, r) of this part

    def forward(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        products, others, norms = [], [], []
        for i, (part, factored) in enumerate(zip(parts, self.factored, strict=True)):
            if factored:
                assert isinstance(part, OuterProducts)
                x, delta, bias = part.x[:, 0].double(), part.delta[:, 0].double(), float(part.bias)
                products.append((x @ getattr(self, f"x_{i}") + bias) * (delta @ getattr(self, f"delta_{i}")))
                norms.append((x.square().sum(dim=1) + bias) * delta.square().sum(dim=1))
            else:
                rows = part.rows().double()
                others.append(rows @ getattr(self, f"directions_{i}"))
                norms.append(rows.square().sum(dim=1))
        if products:
            others.append(torch.stack(products).sum(dim=0) @ self.T)
        z = torch.stack(others).sum(dim=0)
        return z, _rest(torch.stack(norms).sum(dim=0), z)


class Projected(Coordinates):
    """z = Wᵀ(Sg), S of outer products as a product in the frequency domain.

    The transforms there and back are matrices. As in `network/layers/projection.py`, Sg is computed in the precision of
    the gradients, long sums apart.
    """

    forth: Tensor
    back: Tensor
    W: Tensor

    def __init__(self, S: Projection, W: Tensor, shapes: Sequence[Shape], sizes: Sizes) -> None:  # (r, m)
        super().__init__()
        r, self.dim = S.dim, S.dim
        first, firsts = 0, {}
        for name, size in sizes.items():
            firsts[name] = first
            first += size.numel()
        self.plans: list[list[tuple[int, int, int]]] = []  # of dense rows: their columns, and how many entries
        dtypes = [shape.dtype for shape in shapes if shape.is_outer_product]
        self.dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        unit = torch.eye(r // 2 + 1, dtype=torch.complex128)
        back = torch.cat([torch.fft.irfft(unit, n=r), torch.fft.irfft(1j * unit, n=r)])
        self.register_buffer("forth", _transformed(torch.eye(r, dtype=torch.float64)).to(self.dtype))  # (r, 2f)
        self.register_buffer("back", back.to(self.dtype))  # (2f, r)
        self.register_buffer("W", W)
        self.outer: list[bool] = []
        for i, shape in enumerate(shapes):
            self.outer.append(shape.is_outer_product)
            plan, start = [], 0
            for k, name in enumerate(shape.names):
                size = sizes[name]
                rows, columns = (size[0], math.prod(size[1:])) if len(size) > 1 else (math.prod(size), 1)
                weight = Weight(S, firsts[name], rows, columns)
                if self.outer[i] and weight.only_axis is None and len(size) > 1:
                    self._hold_transform(f"delta_{i}", weight.places(0, 0, rows, W))
                    self._hold_transform(f"x_{i}", weight.places(1, 0, columns, W))
                else:
                    self._hold(f"{i}_{k}", weight.entries(0, rows * columns, W))
                plan.append((start, start + rows * columns, k))
                start += rows * columns
            self.plans.append(plan)

    def forward(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        real, imaginary, formed = [], [], []
        f = self.dim // 2 + 1
        for i, part in enumerate(parts):
            if self.outer[i]:
                assert isinstance(part, OuterProducts)
                delta, x = part.delta[:, 0], part.x[:, 0]
                if 1 in (delta.shape[1], x.shape[1]):  # the gradient of a vector
                    formed.append(self._hashed(delta * x, f"{i}_0"))
                else:
                    of_delta, of_x = self._transform(delta, f"delta_{i}"), self._transform(x, f"x_{i}")  # (n, 2f)
                    a, b, c, d = of_delta[:, :f], of_delta[:, f:], of_x[:, :f], of_x[:, f:]
                    real.append(a * c - b * d)
                    imaginary.append(a * d + b * c)
                if part.bias:
                    formed.append(self._hashed(delta, f"{i}_1"))
            else:
                rows = part.rows()
                formed += [self._hashed(rows[:, start:stop], f"{i}_{k}") for start, stop, k in self.plans[i]]
        if real:
            sums = torch.cat([functools.reduce(torch.add, real), functools.reduce(torch.add, imaginary)], dim=1)
            formed.append(sums @ self.back)
        Sg = functools.reduce(torch.add, formed).double()
        z = Sg @ self.W
        return z, _rest(Sg.square().sum(dim=1), z)

    def _hold(self, name: str, entries: Entries) -> None:
        long = entries[0].shape[1] > COLUMNS_AT_ONCE
        self.register_buffer(f"at_{name}", entries[0])
        self.register_buffer(f"signs_{name}", entries[1] if long else entries[1].to(self.dtype))

    def _hold_transform(self, name: str, entries: Entries) -> None:
        """Keep a matrix of transforms instead, where that is smaller than the one of all places."""
        at, signs = entries
        if at.shape[1] > self.dim:
            self._hold(name, entries)
        else:
            hashed = signs.new_zeros(at.shape[1], self.dim).scatter_add_(1, at.T, signs.T)
            self.register_buffer(f"matrix_{name}", _transformed(hashed).to(self.dtype))

    def _hashed(self, values: Tensor, name: str) -> Tensor:  # (n, w) -> (n, r)
        places, signs = getattr(self, f"at_{name}"), getattr(self, f"signs_{name}")
        columns = values.to(signs.dtype).T.contiguous()  # side by side they are added up faster
        found = columns.new_zeros(self.dim, values.shape[0])
        for i in range(places.shape[0]):
            found = found.index_add(0, places[i], columns * signs[i][:, None])
        return found.T

    def _transform(self, values: Tensor, name: str) -> Tensor:  # (n, w) -> (n, 2f)
        if hasattr(self, f"matrix_{name}"):
            return values.to(self.dtype) @ getattr(self, f"matrix_{name}")
        return self._hashed(values, name).to(self.dtype) @ self.forth


def _transformed(hashed: Tensor) -> Tensor:  # (n, r) -> (n, 2f)
    """Return the transforms of rows, real parts first."""
    transformed = torch.fft.rfft(hashed)
    return torch.cat([transformed.real, transformed.imag], dim=1)


def _rest(norms: Tensor, z: Tensor) -> Tensor:
    return (norms - z.square().sum(dim=1)).clamp(min=0.0)


def columns_of(shapes: Sequence[Shape], sizes: Sizes) -> list[Tensor]:
    """Return which columns of J each part's columns are."""
    first, starts = 0, {}
    for name, size in sizes.items():
        starts[name] = first
        first += size.numel()
    return [torch.cat([starts[n] + torch.arange(sizes[n].numel()) for n in shape.names]) for shape in shapes]


def coordinates(covariance: SpectralCovariance, shapes: Sequence[Shape], sizes: Sizes, by_layers: bool) -> Coordinates:
    """Return how to compute the coordinates that a covariance's eigenvalues belong to.

    Args:
        covariance: The covariance.
        shapes: Of the parts that gradients will come in.
        sizes: Of the parameters, in the order of the columns of J.
        by_layers: Whether the rows that it holds come in the same parts.
    """
    p = sum(size.numel() for size in sizes.values())
    r = len(covariance.eigenvalues)
    if isinstance(covariance, ProjectedCovariance):
        exact = covariance.exact
        assert isinstance(exact, EigenbasisCovariance)
        W = torch.from_numpy(exact.W)
        return Projected(covariance.S, W if exact.J is None else exact.J.rows().double().T @ W, shapes, sizes)
    if isinstance(covariance, SketchedCovariance):
        return Directions(covariance.directions.T, shapes, sizes)
    if isinstance(covariance, NystromCovariance):
        J, T = covariance.basis.landmarks, torch.from_numpy(covariance.basis.T)
    elif isinstance(covariance, EigenbasisCovariance):
        J, T = covariance.J, torch.from_numpy(covariance.W)  # type: ignore[assignment]
    else:
        return Directions(_probed(covariance, p), shapes, sizes)
    if J is None:
        return Directions(T, shapes, sizes)
    if by_layers:
        return Kernel(J, T, shapes)
    check_memory(8.0 * p * r)
    return Directions(J.rows().double().T @ T, shapes, sizes)


def check_memory(nbytes: float) -> None:
    """Raise if directions as a dense matrix would take more memory than there is."""
    if nbytes > free_memory() / 2:
        raise ExportError(
            f"the directions of this covariance as one matrix take {nbytes / 1e9:.3g} GB: give "
            "tolerance=0.01 for widths within 1 % of exact, or fit with engine=RandomProjection(dim)"
        )


def _probed(covariance: SpectralCovariance, p: int) -> Tensor:  # (p, r)
    """Return the directions of an engine of one's own, from its answers about unit vectors."""
    check_memory(8.0 * p * len(covariance.eigenvalues))
    step = max(1, PROBED_NUMBERS // p)
    found = []
    for start in range(0, p, step):
        rows = torch.zeros(min(step, p - start), p, dtype=torch.float64)
        rows[torch.arange(len(rows)), start + torch.arange(len(rows))] = 1.0
        found.append(covariance.projections(GradientBatch.of(rows)))
    return torch.from_numpy(np.concatenate(found))


class Answers(nn.Module):
    """Values linear in (z², ρ), one column each, none of them negative."""

    weights: Tensor

    def __init__(self, weights: Tensor) -> None:  # (r + 1, k)
        super().__init__()
        self.register_buffer("weights", weights)

    def forward(self, z: Tensor, rest: Tensor) -> Tensor:  # (n, r), (n,) -> (n, k)
        squares = torch.cat([z.square(), rest[:, None]], dim=1)
        return (squares @ self.weights).clamp(min=0.0)


def answers(covariance: SpectralCovariance, dampings: np.ndarray, leverage: bool) -> Answers:
    """Return h, if asked for, and q under several λ as functions of coordinates."""
    columns = [_leverage_weights(covariance)] if leverage else []
    return Answers(torch.from_numpy(np.stack(columns + [_variance_weights(covariance, d) for d in dampings], axis=1)))


def _variance_weights(covariance: SpectralCovariance, damping: float) -> np.ndarray:  # (r + 1,)
    if isinstance(covariance, ProjectedCovariance):
        weights = Equivalent.of(covariance.eigenvalues, covariance.S.dim, float(damping)).variance_weights
        return _with_rest(weights, len(covariance.eigenvalues))
    tail = covariance.added_tail
    of_rest = 0.0 if tail is None else float(tail.variance(covariance.eigenvalues, damping))
    return np.append(sigma(covariance.eigenvalues, damping), of_rest)


def _leverage_weights(covariance: SpectralCovariance) -> np.ndarray:
    e, damping, tail = covariance.eigenvalues, covariance.chosen_damping, covariance.added_tail
    if isinstance(covariance, ProjectedCovariance):
        return _with_rest(Equivalent.of(e, covariance.S.dim, damping).y, len(e))
    if tail is not None:
        return np.append(1 / (e + damping), float(tail.leverage(e, damping)))
    return np.append(1 / (e + damping), 1 / (covariance.floor + damping) if covariance.floor + damping else 0.0)


def _with_rest(weights: np.ndarray, r: int) -> np.ndarray:
    return weights if len(weights) == r + 1 else np.append(weights, 0.0)


def spectral(covariance: Covariance) -> SpectralCovariance:
    """Return the covariance in its eigenbasis; where that takes long, its memory is checked first."""
    return covariance if isinstance(covariance, SpectralCovariance) else covariance.eigendecomposed()
