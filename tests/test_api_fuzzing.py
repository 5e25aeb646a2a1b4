"""Whatever the public API is called with, the answer is sound or the error is our own: some of the calls that
`make soak` tries thousands of."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.api_calls import sound_or_refused


@pytest.mark.parametrize("name", ["PredictionIntervals", "ClassificationIntervals", "rows in time"])
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_calls_are_answered_or_refused(name, data):
    sound_or_refused(name, data)
