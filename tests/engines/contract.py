"""What every engine must do. A test of a new engine derives from `EngineContract` and says how to make the engine.

    class TestMine(EngineContract):
        engine = Mine(rank=10)

The registered engines are checked in test_contract.py.
"""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import FrozenInstanceError, fields, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

import tests.reference as reference
from deltaband.engines import Accumulator, Covariance, Engine, Known, Problem
from deltaband.storage.encoding import Decoder, Encoder
from tests.support.networks import batch

N, P, DAMPING = 120, 40, 0.3
CUTS = (0, 1, 30, 31, 100, N)


def through_a_file(value):
    """Encode and decode, with JSON in between."""
    encode = Encoder()
    tree = json.loads(json.dumps(encode(value)))
    return Decoder(encode.tensors)(tree)


def totals_over(parts: list[Accumulator], n_rows: int, n_parameters: int) -> list[bool]:
    """`all_reduce` in one thread per part, as processes would do it."""
    barrier, posted, summed = threading.Barrier(len(parts), timeout=20), [None] * len(parts), [None] * len(parts)

    def work(rank):
        def total(array):
            posted[rank] = np.array(array)
            barrier.wait()
            assert len({each.shape for each in posted}) == 1
            result = np.sum(posted, axis=0)
            barrier.wait()
            return result

        summed[rank] = parts[rank].all_reduce(total, n_rows, n_parameters)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return summed


class EngineContract:
    """Set `engine`; `merges_exactly = False` for a sketch, whose parts end in other numbers within the same bound."""

    engine: ClassVar[Engine]
    merges_exactly: ClassVar[bool] = True
    rtol: ClassVar[float] = 1e-7
    single_rtol: ClassVar[float] = 1e-9  # of rows in float32 against the same numbers in float64
    J: ClassVar[np.ndarray] = np.random.default_rng(5).permutation(reference.matrix("decaying", N, P))

    def start(self, J: np.ndarray | None = None, dtype: torch.dtype = torch.float64) -> Accumulator:
        sample = batch(self.J if J is None else J, dtype).between(0, self.engine.sample_size)
        return self.engine.start(Known(None, DAMPING, sample if self.engine.sample_size else None))

    def filled(self, J=None, chunk=1000, dtype=torch.float64, whole=False) -> Accumulator:
        """Rows that are taken in; their sample is of all rows, or of these if they are `whole`."""
        J = self.J if J is None else J
        accumulator = self.start(J if whole else None, dtype)
        for i in range(0, len(J), chunk):
            accumulator.update(batch(J[i : i + chunk], dtype))
        return accumulator

    def parts(self) -> list[Accumulator]:
        return [self.filled(self.J[start:stop]) for start, stop in itertools.pairwise(CUTS)]

    def same(self, mine: Covariance, other: Covariance, rtol: float | None = None) -> None:
        g = batch(reference.probes(self.J))
        rtol = self.rtol if rtol is None else rtol
        scale = float(other.leverage(g).max())
        np.testing.assert_allclose(mine.variance(g), other.variance(g), rtol=rtol, atol=rtol * scale)
        np.testing.assert_allclose(mine.leverage(g), other.leverage(g), rtol=rtol, atol=rtol * scale)
        assert mine.effective_parameters == pytest.approx(other.effective_parameters, rel=rtol)
        assert mine.damping == other.damping

    def as_good(self, merged: Covariance, whole: Covariance) -> None:
        """Equal, or within the bounds that both certify."""
        if self.merges_exactly:
            self.same(merged, whole)
        missed = merged.missed_parameters + whole.missed_parameters
        assert not abs(merged.effective_parameters - whole.effective_parameters) > missed + 1e-6

    # --- settings

    def test_settings_are_frozen_and_untouched_by_a_fit(self):
        before = repr(self.engine), dict(vars(self.engine))
        self.filled().finalise(DAMPING)
        assert (repr(self.engine), vars(self.engine)) == before
        with pytest.raises(FrozenInstanceError):
            self.engine.anything = 1

    def test_the_repr_makes_the_same_engine(self):
        shown = replace(self.engine, **{f.name: f.default for f in fields(self.engine) if not f.repr})
        assert eval(repr(shown), {type(self.engine).__name__: type(self.engine)}) == shown

    def test_settings_survive_a_file(self):
        loaded = through_a_file(self.engine)
        assert type(loaded) is type(self.engine)
        assert loaded == self.engine

    def test_the_cost_is_positive_and_grows_with_the_problem(self):
        problem = Problem(1000, 500, 4, 200, 40)
        more = replace(problem, n_rows=4000, n_parameters=2000, factor_bytes=800)
        cost, larger = self.engine.cost(problem), self.engine.cost(more)
        assert 0 < cost.nbytes <= larger.nbytes
        assert 0 < cost.flops < larger.flops
        assert self.engine.cost(replace(problem, n_rows=None)).nbytes > 0
        assert isinstance(cost.wants_rows, bool)

    def test_a_resized_engine_is_of_the_same_kind_and_no_larger(self):
        resized = self.engine.resized(20, 0.5)
        assert type(resized) is type(self.engine)
        problem = Problem(4000, 2000, 4, 800, 40)
        assert resized.cost(problem).nbytes <= self.engine.cost(problem).nbytes

    # --- rows

    @pytest.mark.parametrize("chunk", [1, 7, 50])
    def test_chunks_do_not_matter(self, chunk):
        self.same(self.filled(chunk=chunk).finalise(DAMPING), self.filled().finalise(DAMPING))

    def test_float32_rows_are_summed_in_float64(self):
        J = self.J.astype(np.float32).astype(np.float64)
        g = J[:50]
        single, double = (
            self.filled(J, dtype=dtype, whole=True).finalise(DAMPING) for dtype in (torch.float32, torch.float64)
        )
        rtol = self.single_rtol if self.merges_exactly else 1e-3  # a sketch rounds the directions that it holds
        q, expected = single.variance(batch(g, torch.float32)), double.variance(batch(g))
        np.testing.assert_allclose(q, expected, rtol=rtol, atol=rtol * expected.max())
        assert single.effective_parameters == pytest.approx(double.effective_parameters, rel=rtol)

    def test_no_rows_are_an_error(self):
        with pytest.raises(ValueError, match="no rows"):
            self.start().finalise(DAMPING)

    # --- parts

    def test_merging_equals_one_pass(self):
        merged, *others = self.parts()
        for other in others:
            merged.merge(other)
        self.as_good(merged.finalise(DAMPING), self.filled().finalise(DAMPING))

    def test_what_was_merged_stays_as_it_was(self):
        one, two = self.filled(self.J[:70]), self.filled(self.J[70:])
        one.merge(two)
        one.update(batch(self.J[:20]))
        self.same(two.finalise(DAMPING), self.filled(self.J[70:]).finalise(DAMPING))

    def test_an_empty_part_merges_both_ways(self):
        full, empty = self.filled(), self.start()
        full.merge(empty)
        empty.merge(self.filled())
        self.same(full.finalise(DAMPING), self.filled().finalise(DAMPING))
        self.as_good(empty.finalise(DAMPING), self.filled().finalise(DAMPING))

    def test_a_new_one_like_it_is_empty_and_merges(self):
        whole = self.filled(self.J[:70])
        new = whole.new_like()
        with pytest.raises(ValueError, match="no rows"):
            new.new_like().finalise(DAMPING)
        new.update(batch(self.J[70:]))
        whole.merge(new)
        self.as_good(whole.finalise(DAMPING), self.filled().finalise(DAMPING))

    @pytest.mark.parametrize("n_empty", [0, 1])
    def test_all_reduce_equals_merging(self, n_empty):
        parts = [*self.parts(), *(self.start() for _ in range(n_empty))]
        summed = totals_over(parts, N, P)
        assert len(set(summed)) == 1
        if not summed[0]:  # nothing has changed
            merged, *others = parts
            for other in others:
                merged.merge(other)
            parts = [merged]
        for part in parts:
            self.as_good(part.finalise(DAMPING), self.filled().finalise(DAMPING))

    def test_fewer_rows_than_parameters_are_reduced_or_left_alone(self):
        parts = [self.filled(self.J[:10]), self.filled(self.J[10:25])]
        totals_over(parts, 25, P)[0] or parts[0].merge(parts[1])
        self.as_good(parts[0].finalise(DAMPING), self.filled(self.J[:25]).finalise(DAMPING))

    # --- files

    @pytest.mark.parametrize("n", [0, 5, 25, 100])
    def test_a_state_survives_a_file(self, n):
        accumulator = self.filled(self.J[:n]) if n else self.start()
        restored = self.engine.from_state(through_a_file(accumulator.state()))
        for each in (accumulator, restored):
            each.update(batch(self.J[n:]))
        self.same(restored.finalise(DAMPING), accumulator.finalise(DAMPING), rtol=0.0)

    @pytest.mark.parametrize("n", [25, N])
    def test_a_covariance_survives_a_file_bit_for_bit(self, n):
        covariance = self.filled(self.J[:n]).finish(DAMPING)
        loaded = through_a_file(covariance)
        self.same(loaded, covariance, rtol=0.0)
        assert loaded.describe() == covariance.describe()
        np.testing.assert_equal(loaded.error_bound, covariance.error_bound)
        np.testing.assert_equal(loaded.missed_parameters, covariance.missed_parameters)

    @pytest.mark.parametrize("n", [25, 100])
    @pytest.mark.parametrize("stored", [False, True])
    def test_resuming_equals_never_having_stopped(self, n, stored):
        covariance = self.filled(self.J[:n]).finish(DAMPING)
        before = covariance.variance(batch(self.J))
        accumulator = self.engine.resume(through_a_file(covariance) if stored else covariance, n, P)
        accumulator.update(batch(self.J[n:]))
        np.testing.assert_array_equal(covariance.variance(batch(self.J)), before)
        self.as_good(accumulator.finish(DAMPING), self.filled().finish(DAMPING))

    # --- answers

    def test_every_damping_is_answered(self):
        covariance = self.filled().finish(DAMPING)
        g = batch(reference.probes(self.J))
        dampings = np.array([0.05, DAMPING, 20.0])
        spectral = covariance.eigendecomposed()
        many = covariance.variances(g, dampings)
        assert many.shape == (len(g), 3)
        for column, damping in zip(many.T, dampings, strict=True):
            scale = spectral.at(damping).leverage(g).max()
            np.testing.assert_allclose(column, spectral.at(damping).variance(g), rtol=1e-7, atol=1e-9 * scale)
        np.testing.assert_allclose(many[:, 1], covariance.variance(g), rtol=1e-7, atol=1e-9 * scale)
        assert spectral.at(20.0).effective_parameters <= spectral.at(0.05).effective_parameters
        singular_values, _ = covariance.spectrum()
        assert (np.diff(singular_values) <= 0).all()
        if not self.engine.needs_damping:
            free = self.filled().finish(None)
            assert free.damping is None
            with pytest.raises(ValueError, match="not chosen yet"):
                free.variance(g)
            np.testing.assert_allclose(free.variances(g, dampings), many, rtol=1e-7, atol=1e-9 * scale)

    @pytest.mark.parametrize("name", reference.SPECTRA)
    @pytest.mark.parametrize(("n", "p"), [(N, P), (20, P)])
    def test_bounds_hold(self, name, n, p):
        J = np.random.default_rng(1).permutation(reference.matrix(name, n, p))
        covariance = self.filled(J, whole=True).finish(DAMPING)
        g = batch(reference.probes(J))
        q, h = covariance.variance(g), covariance.leverage(g)
        assert (q >= 0).all()
        assert (q <= h * (1 + 1e-6) + 1e-9 * h.max()).all()
        p_star = reference.effective_parameters(J, DAMPING)
        assert -1e-9 <= covariance.effective_parameters <= p + 1e-6
        if not np.isnan(covariance.error_bound):  # certified
            assert p_star <= covariance.effective_parameters + covariance.missed_parameters + 1e-5
        if covariance.is_exact:
            expected = [reference.variance(J, DAMPING, row) for row in g.rows().numpy()]
            np.testing.assert_allclose(q, expected, rtol=1e-5, atol=1e-7 * h.max())
            assert covariance.effective_parameters == pytest.approx(p_star, rel=1e-6)
        assert covariance.describe()

    @pytest.mark.parametrize("by", ["variance", "leverage"])
    @pytest.mark.parametrize("n", [25, N])
    def test_the_covariance_between_rows_is_the_bilinear_form_of_q_and_h(self, n, by):
        J = self.J[:n]
        covariance = self.filled(J, whole=True).finish(DAMPING)
        rows, others = reference.probes(J)[:7], np.concatenate([J[:3], reference.probes(J)[-4:]])
        found = covariance.across(batch(others), by)(batch(rows))
        form = getattr(covariance, by)
        sums, differences = (
            form(batch((rows[:, None] + sign * others).reshape(-1, P))).reshape(found.shape) for sign in (1, -1)
        )
        scale = np.abs(np.concatenate([sums, differences])).max()
        # q of a projection is cut off at 0 where it would be less
        clear = (sums > 0) & (differences > 0)
        np.testing.assert_allclose(found[clear], (sums - differences)[clear] / 4, rtol=1e-6, atol=1e-8 * scale)
        assert clear.mean() > 0.5
        if covariance.is_exact:
            expected = reference.between(J, DAMPING, rows, others)[by]
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9 * np.abs(expected).max())
