"""What can be known of a fit before its first row."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Problem:
    """The sizes that an engine's memory and time depend on."""

    n_rows: int | None
    n_parameters: int
    itemsize: int  # bytes of a number in a gradient
    factor_bytes: int  # of one row's gradient, layer by layer
    input_bytes: int  # of one row's input
    inner_flops: float = 0.0  # of an inner product of two rows' gradients; 0: as many as there are factors
    row_seconds: float = 0.0  # to compute one row's gradient
    damped: bool = True  # whether λ is known
    twice: bool = True  # whether the data can be read twice
    recomputed: bool = False  # whether of a row that must be remembered only its input is

    @property
    def kept_bytes(self) -> int:
        """What an engine that keeps rows keeps of each."""
        return self.input_bytes if self.recomputed else self.factor_bytes

    @property
    def product_flops(self) -> float:
        return self.inner_flops or 2.0 * self.factor_bytes / self.itemsize

    @property
    def recomputed_bytes(self) -> int:
        """What it takes to compute rows again: a copy of the weights, the factors of some rows, and of some others that
        they meet."""
        weights = self.n_parameters * self.itemsize
        return weights + max(min(256 * 2**20, 128 * self.factor_bytes), 4 * self.factor_bytes)

    def with_inputs_only(self) -> Problem:
        return replace(self, recomputed=True)
