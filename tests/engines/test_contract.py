"""Every registered engine keeps the contract, in the variants that differ in their sums."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import deltaband.engines
from deltaband import (
    Exact,
    FrequentDirections,
    ImportantDirections,
    Nystrom,
    RandomProjection,
    RobustFrequentDirections,
)
from deltaband.engines import registered_engines
from tests.engines.contract import EngineContract

pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
OWN = {cls for cls in registered_engines().values() if cls.__module__.startswith("deltaband.")}
SKETCHES = (FrequentDirections, ImportantDirections, RobustFrequentDirections)
VARIANTS = [
    Exact(),
    Nystrom(10),
    Nystrom(10, choose="leverage", tail="none", seed=3),
    RandomProjection(25, seed=1),
    RandomProjection(64),
    *(cls(10) for cls in SKETCHES),
    ImportantDirections(10, tail="estimate", compress=True),
    RobustFrequentDirections(),
]


def contract_of(engine):
    exactly = not isinstance(engine, SKETCHES)
    single = 1e-5 if isinstance(engine, RandomProjection) else EngineContract.single_rtol  # it projects in float32
    settings = {"engine": engine, "merges_exactly": exactly, "single_rtol": single}
    return type(f"Test{engine!r}", (EngineContract,), settings)


for variant in VARIANTS:
    globals()[f"Test{variant!r}"] = contract_of(variant)


def test_every_engine_of_the_package_is_tried():
    assert {type(engine) for engine in VARIANTS} == OWN


def test_every_engine_is_public_and_in_the_documents():
    text = Path("docs/api/engines.md").read_text(), Path("docs/engines.md").read_text()
    for cls in OWN:
        assert getattr(deltaband, cls.__name__) is cls
        assert cls.__name__ in deltaband.engines.__all__
        assert f".. autoclass:: deltaband.{cls.__name__}\n" in text[0] + "\n"
    table = set(re.findall(r"^\| `(\w+)\(", text[1], flags=re.MULTILINE))
    assert table == {cls.__name__ for cls in OWN} - {"Exact"}


def test_only_frozen_dataclasses_are_engines():
    @dataclass
    class Thawed:
        pass

    for cls in (Thawed, int):
        with pytest.raises(TypeError, match="a frozen dataclass derived from Engine"):
            deltaband.engines.register(cls)


def test_no_engine_takes_the_name_of_another():
    with pytest.raises(ValueError, match="Nystrom is the name of something that deltaband itself stores"):
        deltaband.engines.register(dataclass(frozen=True)(type("Nystrom", (Exact,), {"__module__": "mine"})))
    assert registered_engines()["nystrom"] is Nystrom
