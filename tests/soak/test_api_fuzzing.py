"""Thousands of calls of the public API with anything: see tests/support/api_calls.py."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.api_calls import sound_or_refused

EXAMPLES = {"PredictionIntervals": 1500, "ClassificationIntervals": 600, "rows in time": 600, "files": 200}


@pytest.mark.parametrize("name", EXAMPLES)
def test_calls_are_answered_or_refused(name):
    seen = Counter()

    @settings(max_examples=EXAMPLES[name], deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def tried(data):
        seen["answered" if sound_or_refused(name, data) else "refused"] += 1

    tried()
    print(f"{name}: {sum(seen.values())} calls, {dict(seen)}")
    assert sum(seen.values()) >= EXAMPLES[name]
