"""The comparison of all pairs, which the walk replaced, gives the same bounds."""

import numpy as np
import pytest

from benchmarks.calibration import all_pairs, scales


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_all_pairs_give_the_bounds_of_the_walk(learnt, level):
    scale, q = scales(40, learnt)
    np.testing.assert_allclose(all_pairs(scale, q, level), scale.bounds(q, (level,))[1][:, 0], rtol=1e-9)
