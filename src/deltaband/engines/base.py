"""What an engine is: settings, an accumulator that takes in gradients, and the covariance value that it ends in.

Merging, saving, adding up over processes and resuming follow from the fields of the accumulator.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from ..network.gradient_batch import GradientBatch
from ..storage import encoding
from .covariance import Covariance
from .fields import Total, copied, merged, summed

if TYPE_CHECKING:
    from .exact import Problem

E = TypeVar("E", bound="type[Engine]")

ENGINES: dict[str, type[Engine]] = {}


class Cost(NamedTuple):
    """What an engine takes for a problem."""

    nbytes: float  #: At its peak, without the chunk of rows in progress.
    flops: float  #: Multiplications and additions, without those of the gradients.
    wants_rows: bool = True  #: Whether it needs whole rows, or inner products alone.
    pairs: float = 0.0  #: How many inner products of two rows are among the operations.
    knows_leverages: bool = False  #: Whether the leverages of the training rows follow without their gradients.


@dataclass(frozen=True)
class Known:
    """What is known before the first row, as far as it is: it helps an engine, nothing more."""

    n_rows: int | None = None  #: How many rows there will be.
    damping: float | None = None  #: λ.
    sample: GradientBatch | None = None  #: Gradients of `Engine.sample_size` rows, fewer where there are fewer.


@dataclass(frozen=True)
class Engine(ABC):
    """The settings of a way to a covariance: a frozen dataclass that `register` makes known.

    Its fields have defaults; check them in `__post_init__`. Write `cost` and `start`.
    """

    needs_damping: ClassVar[bool] = False  #: Whether λ must be known before the first row.
    is_exact: ClassVar[bool] = False  #: Whether the covariance is always exact.
    size_setting: ClassVar[str | None] = None  #: The field that a plan chooses as large as memory allows.
    is_planned: ClassVar[bool] = True  #: Whether a plan lists an engine that has a `size_setting`.
    seed = 0  #: Seed for drawing the sample; a setting of engines that want one.

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__repr__" not in vars(cls):  # otherwise the dataclass makes one, with all fields
            cls.__repr__ = Engine.__repr__  # type: ignore[method-assign]

    @property
    def sample_size(self) -> int:
        """How many training rows, drawn at random, `start` is given; most engines want none."""
        return 0

    @abstractmethod
    def cost(self, problem: Problem) -> Cost:
        """Estimate the memory and time of a fit.

        Args:
            problem: The sizes of the fit.

        Returns:
            Bytes, operations, and whether it needs whole rows or inner products alone.
        """

    @abstractmethod
    def start(self, known: Known = Known()) -> Accumulator:
        """Return an accumulator that has seen no row.

        Args:
            known: What is known before the first row; it has a sample if `sample_size` asks for one.

        Returns:
            The accumulator.
        """

    def resized(self, size: int, share: float = 1.0) -> Engine:
        """Return an engine for a sample of the rows; by default the same one.

        Args:
            size: The most directions that it may keep.
            share: The share of its directions to keep.

        Returns:
            The settings for it; the engine itself is not changed.
        """
        return self

    def resume(self, covariance: Any, n_rows: int, n_parameters: int) -> Accumulator:
        """Return an accumulator that has seen the n rows that ended in this covariance.

        By default it is the copy that `Accumulator.finish` keeps; computing the sums back instead saves that memory.

        Args:
            covariance: The covariance that the rows ended in.
            n_rows, n_parameters: Rows and columns of J.

        Returns:
            An accumulator of its own: the covariance stays as it is.

        Raises:
            ValueError: If the covariance has no such copy.
        """
        if covariance.accumulated is None:
            raise ValueError(f"{self!r} cannot resume from a covariance that was not made by Accumulator.finish")
        return self.from_state(copied(covariance.accumulated))

    def from_state(self, state: dict[str, Any]) -> Accumulator:
        """Return the accumulator that was saved.

        Args:
            state: What its `Accumulator.state` returned.

        Returns:
            The accumulator, as it was.
        """
        values = {name: value for name, value in state.items() if name != "accumulator"}
        return encoding.registered(state["accumulator"])(self, **values)

    def __repr__(self) -> str:
        shown = [each for each in fields(self) if each.repr]
        names = [each.name for i, each in enumerate(shown) if i == 0 or getattr(self, each.name) != each.default]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def register(cls: E) -> E:
    """Make an engine known by its class name: to the command line, to files and, with a `size_setting`, to plans.

    Args:
        cls: The class of its settings.

    Returns:
        The class itself.

    Raises:
        TypeError: If it is not a frozen dataclass derived from `Engine`.
        ValueError: If deltaband itself has an engine of this name.
    """
    if not (is_dataclass(cls) and issubclass(cls, Engine) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise TypeError(f"an engine is a frozen dataclass derived from Engine, got {cls!r}")
    encoding.storable(cls)
    ENGINES[re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()] = cls
    return cls


@dataclass
class Accumulator(ABC):
    """Rows so far. Fields made by `reduced`, `shared`, `concatenated` or `private` are saved and merged as these say;
    others are working memory. All have defaults: an accumulator without rows is `cls(engine)`."""

    engine: Engine

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        encoding.storable(cls)

    @abstractmethod
    def update(self, g: GradientBatch) -> None:
        """Take in the gradients of some rows.

        Args:
            g: The gradients, which answer `rows()`, `inner(other)` and `projected(S)`; they may be kept, and are never
                changed.
        """

    def prepare(self) -> None:  # noqa: B027 - most have nothing to do
        """Compute what `finalise` needs that takes long and loses nothing: it may be interrupted there."""

    @abstractmethod
    def finalise(self, damping: float | None) -> Covariance:
        """Return the covariance of all rows; the accumulator may hand its memory over and be empty.

        Args:
            damping: λ; if None, the covariance is a `SpectralCovariance`, which answers for every λ.

        Returns:
            The covariance.
        """

    def finish(self, damping: float | None) -> Covariance:
        """Return the covariance, with a copy of the accumulator where the engine could not resume without.

        Args:
            damping: As in `finalise`.

        Returns:
            The covariance, which `Engine.resume` can go on from.
        """
        if type(self.engine).resume is not Engine.resume:
            return self.finalise(damping)
        kept = copied(self.state())
        return replace(self.finalise(damping), accumulated=kept)

    def check_mergeable(self, other: Self) -> None:
        """Raise where the rows of two accumulators cannot be merged.

        Args:
            other: An accumulator of the same class.

        Raises:
            ValueError: If engines, or fields that are shared, differ.
        """
        if self.engine != other.engine:
            raise ValueError(f"sums of different engines cannot be merged: {self.engine!r} and {other.engine!r}")
        for each in self._declared("shared"):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if each.metadata["check"] and not np.array_equal(mine, theirs):
                raise ValueError(f"sums of different {each.name} cannot be merged: {mine} and {theirs}")

    def merge(self, other: Self) -> None:
        """Take in the rows that another accumulator has seen, which stays as it is.

        Args:
            other: An accumulator of the same class.
        """
        self.check_mergeable(other)
        for each in self._declared("sum", "max", "concatenate"):
            setattr(self, each.name, merged(each, getattr(self, each.name), getattr(other, each.name)))

    def new_like(self) -> Self:
        """Return an accumulator without rows that can be merged into this one."""
        return type(self)(self.engine, **{each.name: getattr(self, each.name) for each in self._declared("shared")})

    def clear(self) -> None:
        """Forget all rows; what is shared stays."""
        vars(self).update(vars(self.new_like()))

    def state(self) -> dict[str, Any]:
        """Return what `Engine.from_state` needs, as values that a file can hold."""
        return {"accumulator": type(self).__name__} | {each.name: getattr(self, each.name) for each in self._declared()}

    def numbers(self) -> dict[str, Any]:
        """Return the declared fields that are numbers: what a covariance keeps to resume from beside its arrays."""
        return {name: value for name, value in self.state().items() if isinstance(value, int | float)}

    def all_reduce(self, total: Total, n_rows: int, n_parameters: int) -> bool:
        """Take in the rows of all processes; return whether that was possible, as it is where merging only adds up.

        Args:
            total: A function that adds up an array of the same shape over all processes.
            n_rows, n_parameters: Rows and columns of J, those of all processes together.

        Returns:
            Whether the rows of all processes are in it now; if not, it is as it was.
        """
        if not self.is_sum(n_rows, n_parameters):
            return False
        for each in self._declared("sum"):
            setattr(self, each.name, summed(each, getattr(self, each.name), total))
        return True

    def is_sum(self, n_rows: int, n_parameters: int) -> bool:
        """Return whether `all_reduce` is possible.

        Args:
            n_rows, n_parameters: As there.

        Returns:
            Whether all declared fields are sums, or shared, so that merging only adds up.
        """
        return not self._declared("max", "concatenate", "private")

    def sized_engine(self, size: int) -> Engine:
        """Return the settings with the size that was in fact taken.

        Args:
            size: The largest that it may be.

        Returns:
            The settings; by default those that are `resized`.
        """
        return self.engine.resized(size)

    def _declared(self, *kinds: str) -> list[Field[Any]]:
        """Return the declared fields of these kinds, or of all."""
        declared = [each for each in fields(self) if "combine" in each.metadata]
        return [each for each in declared if not kinds or each.metadata["combine"] in kinds]
