"""A band in a file is the band that was fitted, bit for bit, or a clear error."""

import ast
import errno
import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.base import clone
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, PowerTransformer, RobustScaler, StandardScaler
from torch import nn

import deltaband
from deltaband import (
    ArtefactError,
    ClassificationIntervals,
    DeltabandWarning,
    Exact,
    FrequentDirections,
    ImportantDirections,
    NotFittedError,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
    storage,
)
from deltaband.engines import Problem, register
from deltaband.storage import container
from tests.network.test_families import Encoder, Packed, Pooled
from tests.support.classifiers import classifier
from tests.support.networks import mlp, regression

pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")
X, Y = regression(80)
LEVELS = (0.5, 0.9)
ENGINES = [
    "auto",
    Exact(),
    ImportantDirections(10),
    RobustFrequentDirections(10),
    RobustFrequentDirections(10, tail="none", compress=True),
    FrequentDirections(10),
    Nystrom(20),
    Nystrom(20, choose="leverage", tail="none", seed=3),
    RandomProjection(20, seed=1),
]


def fitted(model=None, engine="auto", x=X, y=Y, **options):
    options = options or {"weight_decay": 1e-2}
    return PredictionIntervals(model or mlp(), engine=engine, **options).fit(x, y, progress=False)


def there_and_back(band, path, **given):
    band.save(path)
    return type(band).load(path, band.model, **given)


def same(band, loaded, x=X):
    """All answers, to the last bit."""
    asked = [band.predict, lambda x: band.predict(x, LEVELS), band.variance, band.leverage]
    again = [loaded.predict, lambda x: loaded.predict(x, LEVELS), loaded.variance, loaded.leverage]
    for one, other in zip(asked, again, strict=True):
        for a, b in zip(numbers(one(x)), numbers(other(x)), strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert band.summary() == loaded.summary()
    return True


def numbers(answer):
    if hasattr(answer, "log_odds"):
        return (*answer.log_odds, *answer.probability)
    return tuple(answer) if isinstance(answer, deltaband.Intervals) else (answer,)


def rewritten(path, change):
    """The file with other metadata, under a digest that is right."""
    with safe_open(path, framework="pt") as file:
        metadata, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del metadata["digest"]
    change(metadata, tensors)
    save_file(tensors, path, metadata | {"digest": container.digest(tensors, metadata)})


# --- the same numbers


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
@pytest.mark.parametrize("calibrated", [None, False, True])
@pytest.mark.parametrize("hidden", [8, 40])  # n > p, n < p
def test_what_is_saved_predicts_bit_for_bit_what_was_fitted(engine, calibrated, hidden, tmp_path):
    band = fitted(mlp(hidden=hidden, dtype=torch.float32), engine)
    if calibrated is not None:
        band.calibrate(*regression(60, seed=5), tune=calibrated)
    assert same(band, there_and_back(band, tmp_path / "x.band"))


def test_a_calibration_without_a_damping_is_saved(tmp_path):
    for engine in (Exact(), RandomProjection(20), RobustFrequentDirections(10)):
        band = PredictionIntervals(mlp(), engine=engine).fit(X, Y, progress=False)
        band.calibrate(*regression(60, seed=5))
        loaded = there_and_back(band, tmp_path / "x.band")
        assert loaded.damping_ is None
        np.testing.assert_array_equal(loaded.predict(X).upper, band.predict(X).upper)


@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("outputs", [None, 1, [2, 0]])
def test_several_outputs(per_output, joint, outputs, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    y = torch.stack([Y, 2 * Y, -Y], dim=1)
    band = fitted(model, x=X, y=y, damping=0.5, per_output=per_output, outputs=outputs, target_transform=(1.0, 2.0))
    assert same(band, there_and_back(band, tmp_path / "x.band"))
    band.calibrate(X[:50] + 0.1, y[:50], joint=joint)
    assert same(band, there_and_back(band, tmp_path / "x.band"))


@pytest.mark.parametrize(
    ("classes", "per_output"),
    [(None, False), (2, False), ([0, 2], False), ("predicted", False), (None, True), ([0, 2], True)],
)
def test_classifiers(classes, per_output, tmp_path):
    band = ClassificationIntervals(classifier(4), weight_decay=1e-2, classes=classes, per_output=per_output)
    band.fit(X, torch.arange(80) % 4, progress=False)
    assert same(band, there_and_back(band, tmp_path / "x.band"))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (lambda: Pooled(nn.LSTM(3, 4, batch_first=True), 4), torch.randn(30, 5, 3)),
        (lambda: Pooled(nn.Linear(3, 30), 30), torch.randn(30, 5, 3)),
        (lambda: Encoder(), torch.randint(1, 9, (30, 6))),
        (
            lambda: nn.Sequential(
                nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 1)
            ),
            torch.randn(30, 1, 6, 6),
        ),
        (
            lambda: Packed(nn.GRU(3, 4, bidirectional=True, batch_first=True), False),
            {"x": torch.randn(30, 5, 3), "lengths": torch.randint(1, 6, (30,))},
        ),
        (lambda: nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 1)), torch.randint(0, 50, (30, 3))),
    ],
    ids=["lstm", "linear over steps", "transformer", "convolution", "packed, inputs by name", "embedding"],
)
@pytest.mark.parametrize("engine", [Exact(), Nystrom(10)], ids=repr)
def test_families_of_networks(model, x, engine, tmp_path):
    torch.manual_seed(0)
    band = fitted(model(), engine, x=x, y=torch.randn(30))
    assert same(band, there_and_back(band, tmp_path / "x.band"), x)


def test_rows_that_are_computed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(Problem, "recomputed_bytes", property(lambda p: 10 * p.factor_bytes))
    model = mlp(hidden=200)
    kept = PredictionIntervals(model, damping=1.0, engine=Exact(), memory=1e9).plan(X, Y).chosen
    band = fitted(model, Exact(), damping=1.0, memory=kept.nbytes - 1)
    assert band.plan(X, Y).chosen.problem.recomputed
    band.save(tmp_path / "x.band")
    assert same(band, PredictionIntervals.load(tmp_path / "x.band", model))
    with pytest.raises(ArtefactError, match="computes its training rows again"):
        PredictionIntervals.load(tmp_path / "x.band", mlp(hidden=200, seed=1), strict=False)


class NamedNetwork(nn.Module):
    """Has a layer of the name that files once gave to networks which compute rows again."""

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(3, 1).double()

    def forward(self, x):
        return self.network(x)


def test_a_layer_named_network_is_loaded_for_other_weights(tmp_path):
    fitted(NamedNetwork(), damping=1.0).save(tmp_path / "x.band")
    with pytest.warns(DeltabandWarning, match="weights have changed"):
        PredictionIntervals.load(tmp_path / "x.band", NamedNetwork(), strict=False)


def test_parameters_by_pattern_and_by_function(tmp_path):
    for parameters in ("last", ["2.*"], lambda name, w: "weight" in name):
        band = fitted(damping=0.5, parameters=parameters)
        loaded = there_and_back(band, tmp_path / "x.band")
        assert loaded.n_parameters_ == band.n_parameters_
        assert same(band, loaded)


def test_a_loaded_band_can_be_calibrated_fitted_again_and_saved_again(tmp_path):
    band = fitted(engine=RobustFrequentDirections(10))
    loaded = there_and_back(band, tmp_path / "x.band")
    for each in (loaded, band):  # the file holds no residuals to learn the noise from
        each.calibrate(*regression(60, seed=5), noise="none")
    assert same(band, loaded)
    assert same(band, there_and_back(loaded, tmp_path / "y.band"))
    assert loaded.fit(X, Y, progress=False).summary() == band.fit(X, Y, progress=False).summary()


# --- what is and is not in a file


def test_functions_are_given_again(tmp_path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return {"y": self.net(x)}

    def pick(out):
        return out["y"]

    band = fitted(Named(), damping=0.5, output=pick)
    band.save(tmp_path / "x.band")
    with pytest.raises(ArtefactError, match="fitted with output=pick, which no file holds: give output= again"):
        PredictionIntervals.load(tmp_path / "x.band", band.model)
    assert same(band, PredictionIntervals.load(tmp_path / "x.band", band.model, output=pick))
    plain = fitted()
    plain.save(tmp_path / "y.band")
    with pytest.raises(ArtefactError, match="fitted without output: leave it out"):
        PredictionIntervals.load(tmp_path / "y.band", plain.model, output=pick)


def test_functions_other_than_those_of_the_fit_are_noticed(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(hidden=8)

        def forward(self, x):
            mean = self.net(x)
            return mean, 1e-4 * mean.square() + 1e-5

    functions = {"output": lambda out: out[0], "variance": lambda out: out[1]}
    band = fitted(Two(), damping=0.5, **functions)
    band.save(tmp_path / "a.band")
    loaded = PredictionIntervals.load(tmp_path / "a.band", band.model, **functions)
    assert same(band, loaded)
    loaded.save(tmp_path / "b.band")  # what a file says of its functions, another made from it says, too
    for path in (tmp_path / "a.band", tmp_path / "b.band"):
        for wrong in (
            {"variance": lambda out: out[1].sqrt()},
            {"variance": lambda out: 1.1 * out[1]},
            {"output": lambda out: -out[0]},
            {"variance": lambda out: out["no such name"]},
        ):
            with pytest.raises(ArtefactError, match="output= and variance= is not what the band was fitted with"):
                PredictionIntervals.load(path, band.model, **functions | wrong)
    of_targets = PowerTransformer().fit(np.random.default_rng(0).lognormal(size=(50, 1)))
    other = PowerTransformer().fit(np.random.default_rng(0).lognormal(sigma=2, size=(50, 1)))
    band = fitted(damping=0.5, target_transform=of_targets)
    band.save(tmp_path / "c.band")
    PredictionIntervals.load(tmp_path / "c.band", band.model, target_transform=of_targets)
    with pytest.raises(ArtefactError, match="target_transform= is not what the band was fitted with"):
        PredictionIntervals.load(tmp_path / "c.band", band.model, target_transform=other)


def test_a_network_that_refuses_made_up_rows_can_be_loaded_all_the_same(tmp_path):
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            if not torch.isin(x, X).all():
                raise ValueError("never seen")
            return {"y": self.net(x)}

    band = fitted(Picky(), damping=0.5, output=lambda out: out["y"])
    band.save(tmp_path / "a.band")
    loaded = PredictionIntervals.load(tmp_path / "a.band", band.model, output=lambda out: out["y"])
    assert torch.equal(loaded.predict(X[:5]).lower, band.predict(X[:5]).lower)


def test_load_asks_only_for_functions_that_predict_needs(tmp_path):
    def unpack(batch):
        return batch["x"], batch["y"]

    band = PredictionIntervals(mlp(), damping=0.5, batch=unpack).fit([{"x": X, "y": Y}], progress=False)
    band.save(tmp_path / "a.band")
    loaded = PredictionIntervals.load(tmp_path / "a.band", band.model)
    assert same(band, loaded)
    with pytest.raises(TypeError, match="pair"):
        loaded.calibrate([{"x": X, "y": Y}])
    told = PredictionIntervals.load(tmp_path / "a.band", band.model, batch=unpack)
    assert len(told.predict([{"x": X, "y": None}])) == len(X)
    assert loaded.merge(fitted(band.model, damping=0.5)).n_rows_ == 2 * len(X)


@pytest.mark.parametrize(
    "scaler", [StandardScaler(), MinMaxScaler((-1, 3)), MaxAbsScaler(), RobustScaler(), (3.0, 2.0)]
)
def test_an_affine_transform_is_in_the_file_as_numbers(scaler, tmp_path):
    rng = np.random.default_rng(0)
    of_inputs = of_targets = scaler
    if not isinstance(scaler, tuple):
        of_inputs, of_targets = (
            clone(scaler).fit(rng.normal(3, 2, (50, 3))),
            clone(scaler).fit(rng.normal(2, 1, (9, 1))),
        )
    band = fitted(damping=0.5, input_transform=of_inputs, target_transform=of_targets, targets="original")
    assert same(band, there_and_back(band, tmp_path / "x.band"))
    assert b"sklearn" not in (tmp_path / "x.band").read_bytes()
    for name in ("input_transform", "target_transform"):
        with pytest.raises(ArtefactError, match=f"holds the numbers of its {name}: leave it out"):
            PredictionIntervals.load(tmp_path / "x.band", band.model, **{name: scaler})


def test_other_transforms_are_given_to_load_again(tmp_path):
    of_targets = PowerTransformer().fit(np.random.default_rng(0).normal(2, 1, (50, 1)))
    band = fitted(damping=0.5, input_transform=torch.tanh, target_transform=of_targets)
    band.save(tmp_path / "x.band")
    with pytest.raises(ArtefactError, match="target_transform=PowerTransformer, which no file holds"):
        PredictionIntervals.load(tmp_path / "x.band", band.model, input_transform=torch.tanh)
    with pytest.raises(ArtefactError, match="input_transform=tanh, which no file holds"):
        PredictionIntervals.load(tmp_path / "x.band", band.model, target_transform=of_targets)
    functions = {"input_transform": torch.tanh, "target_transform": of_targets}
    assert same(band, PredictionIntervals.load(tmp_path / "x.band", band.model, **functions))


def test_a_score_of_the_users_is_missed_only_where_it_is_needed(tmp_path):
    band = fitted(engine=ImportantDirections(10, score=lambda d, damping: d))
    loaded = there_and_back(band, tmp_path / "x.band")
    assert same(band, loaded)
    with pytest.raises(ValueError, match="is your own function, which no file holds"):
        loaded.fit(X, Y, progress=False)


def test_training_rows_are_in_the_file_only_if_they_are_asked_for(tmp_path):
    band = fitted(engine=RobustFrequentDirections(10))
    band.save(tmp_path / "without.band")
    band.save(tmp_path / "with.band", sample=True)
    without, with_ = (PredictionIntervals.load(tmp_path / f"{name}.band", band.model) for name in ("without", "with"))
    assert str(with_.error_report()) == str(band.error_report())
    with pytest.raises(ValueError, match=re.escape("save(..., sample=True)")):
        without.error_report()
    row = X[0].numpy().tobytes()
    assert row not in (tmp_path / "without.band").read_bytes()
    assert storage.inspect(tmp_path / "with.band")["holds_sample"]


def test_weights_and_notes(tmp_path):
    model = mlp()
    model.register_buffer("tied", model[0].weight.detach())
    band = fitted(model)
    storage.save(band, tmp_path / "x.band", weights=True, notes={"factory": "nets:make"})
    found = storage.weights(tmp_path / "x.band")
    assert list(found) == sorted(model.state_dict())
    assert all(torch.equal(found[name], w) for name, w in model.state_dict().items())
    other = mlp(seed=1)
    other.register_buffer("tied", torch.zeros(8, 3).double())
    other.load_state_dict(found)
    assert same(band, PredictionIntervals.load(tmp_path / "x.band", other))
    assert storage.inspect(tmp_path / "x.band")["notes"] == {"factory": "nets:make"}
    band.save(tmp_path / "y.band")
    with pytest.raises(ArtefactError, match="saved without weights=True"):
        storage.weights(tmp_path / "y.band")


def test_inspect_tells_what_was_fitted(tmp_path):
    band = fitted(engine=RobustFrequentDirections(10)).calibrate(*regression(60, seed=5))
    band.save(tmp_path / "x.band")
    about = storage.inspect(tmp_path / "x.band")
    assert about["format"] == container.FORMAT
    assert about["deltaband"] == deltaband.__version__
    assert about["torch"] == torch.__version__
    assert about["kind"] == "PredictionIntervals"
    assert about["engine"] == "RobustFrequentDirections(rank=10)"
    assert about["training_rows"] == 80
    assert about["damping"] == band.damping_
    assert about["noise_std"] == [band.noise_std_]
    assert about["effective_parameters"] == [band.effective_parameters_]
    assert about["calibration_rows"] == 60
    assert about["parameters"] == {name: list(w.shape) for name, w in band.model.named_parameters()}
    assert about["summary"] == band.summary()
    assert len(about["fingerprint"]) == 32
    json.dumps(about)


def test_the_size_is_known_before(tmp_path):
    for engine in (Exact(), RobustFrequentDirections(10), Nystrom(20)):
        band = fitted(mlp(hidden=40), engine)
        band.save(tmp_path / "x.band", weights=True)
        size = (tmp_path / "x.band").stat().st_size
        assert size <= storage.size(band, weights=True) <= 1.1 * size + 1000


def test_no_two_copies_of_what_a_calibration_shares_with_its_fit(tmp_path):
    band = fitted(mlp(hidden=200), Exact(), damping=1.0)  # dual: the layers' inputs of all rows
    before = storage.size(band)
    band.calibrate(*regression(60, seed=5), noise="none")
    assert storage.size(band) - before < 8 * 80 * 80 + 8 * 60 * 75 * 2 + 20_000  # eigenvectors and scores


# --- models and files that do not go together


def test_other_weights_are_named(tmp_path):
    model = mlp()
    band = fitted(model)
    band.save(tmp_path / "x.band")
    other = mlp()
    with torch.no_grad():
        other[2].weight[0, 3] += 1e-12
    with pytest.raises(ArtefactError, match=re.escape("other weights than this model has: first '2.weight'")):
        PredictionIntervals.load(tmp_path / "x.band", other)
    with pytest.warns(DeltabandWarning, match=re.escape("changed since fit (first: '2.weight')")):
        PredictionIntervals.load(tmp_path / "x.band", other, strict=False)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: mlp(hidden=9), re.escape("'0.weight' has shape (8, 3) in the file and is (9, 3) in the model")),
        (lambda: nn.Linear(3, 1).double(), "'0.weight' has shape .* is not there"),
        (lambda: nn.Sequential(*mlp(), nn.Linear(1, 1).double()), "43 trainable parameters now and had 41"),
        (lambda: mlp(dtype=torch.float32), "'0.weight'"),
        (lambda: mlp().requires_grad_(False), "no trainable parameters"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_another_network_is_refused(other, message, strict, tmp_path):
    fitted().save(tmp_path / "x.band")
    if "0.weight" in message and not strict and "shape" not in message:
        with pytest.warns(DeltabandWarning, match=message):
            PredictionIntervals.load(tmp_path / "x.band", other(), strict=False)
        return
    with pytest.raises(ValueError, match=message):
        PredictionIntervals.load(tmp_path / "x.band", other(), strict=strict)


def test_a_band_of_the_other_kind_is_named(tmp_path):
    band = ClassificationIntervals(classifier(4), weight_decay=1e-2).fit(X, torch.arange(80) % 4, progress=False)
    band.save(tmp_path / "x.band")
    with pytest.raises(TypeError, match=r"holds ClassificationIntervals: load it with ClassificationIntervals\.load"):
        PredictionIntervals.load(tmp_path / "x.band", band.model)


def test_nothing_that_is_not_fitted_is_saved(tmp_path):
    with pytest.raises(NotFittedError):
        PredictionIntervals(mlp()).save(tmp_path / "x.band")
    assert list(tmp_path.iterdir()) == []


def test_a_registered_subclass_of_an_engine_is_saved_as_itself(tmp_path):
    @register
    class SubclassOfExact(Exact):
        pass

    band = fitted(engine=SubclassOfExact())
    loaded = there_and_back(band, tmp_path / "x.band")
    assert type(loaded.engine) is SubclassOfExact
    assert same(band, loaded)


def test_an_engine_that_is_not_registered_is_refused_and_nothing_written(tmp_path):
    class Mine(Exact):
        pass

    band = fitted(engine=Mine())
    with pytest.raises(TypeError, match="Mine is not registered and cannot be saved"):
        band.save(tmp_path / "x.band")
    assert list(tmp_path.iterdir()) == []


# --- files that are damaged, foreign, or from the future


def test_a_crash_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.band"
    fitted().save(path)
    before = path.read_bytes()

    def crash(tensors, filename, metadata):
        Path(filename).write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", crash)
    with pytest.raises(KeyboardInterrupt):
        fitted(mlp(seed=1)).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"would take .* MB, and 0.001 MB are free") as raised:
        fitted().save(tmp_path / "x.band")
    assert raised.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_paths_that_are_no_files(tmp_path):
    band = fitted()
    with pytest.raises(FileNotFoundError):
        band.save(tmp_path / "nowhere" / "x.band")
    with pytest.raises(IsADirectoryError):
        band.save(tmp_path)
    with pytest.raises(FileNotFoundError):
        PredictionIntervals.load(tmp_path / "x.band", band.model)
    with pytest.raises(OSError, match="irectory"):
        PredictionIntervals.load(tmp_path, band.model)


class Bomb:
    exploded = False

    def __reduce__(self):
        return setattr, (Bomb, "exploded", True)


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"\x00" * 100, b"a,b\n1,2\n", pickle.dumps(Bomb()), b"\xff" * 8 + b"{}", b"PK\x03\x04" + b"\x00" * 50],
)
def test_foreign_files_are_refused_and_run_no_code(content, tmp_path):
    path = tmp_path / "x.band"
    path.write_bytes(content)
    for read in (lambda: PredictionIntervals.load(path, mlp()), lambda: storage.inspect(path)):
        with pytest.raises(ArtefactError, match=r"x\.band is not a band of deltaband, or it is damaged"):
            read()
    assert not Bomb.exploded


def test_the_weights_of_something_else_are_no_band(tmp_path):
    save_file({"w": torch.zeros(3)}, tmp_path / "x.band")
    with pytest.raises(ArtefactError, match="is a safetensors file, but not a band of deltaband"):
        PredictionIntervals.load(tmp_path / "x.band", mlp())


def test_a_newer_format_says_to_update(tmp_path):
    band = fitted()
    band.save(tmp_path / "x.band")
    rewritten(tmp_path / "x.band", lambda metadata, tensors: metadata.update(format="4", deltaband="9.9"))
    with pytest.raises(ArtefactError, match=r"written by deltaband 9\.9 in format 4, .* update deltaband"):
        PredictionIntervals.load(tmp_path / "x.band", band.model)


@pytest.mark.parametrize("older", ["1", "2"])
def test_a_format_before_the_first_release_says_to_fit_again(tmp_path, older):
    band = fitted()
    band.save(tmp_path / "x.band")
    rewritten(tmp_path / "x.band", lambda metadata, tensors: metadata.update(format=older))
    with pytest.raises(ArtefactError, match=rf"in format {older}, .* reads format 3: fit again"):
        PredictionIntervals.load(tmp_path / "x.band", band.model)


def exchange(what, by):
    return lambda metadata, tensors: metadata.update(tree=metadata["tree"].replace(what, by))


@pytest.mark.parametrize(
    "change",
    [
        exchange('"ExactCovariance"', '"os.system"'),
        exchange('"class": "Exact"', '"class": "Popen"'),
        exchange('"n_rows"', '"rows"'),
        exchange('"class": "Fit"', '"class": "Tail"'),
        exchange('"array"', '"anything"'),
        exchange('"fits"', '"kept"'),
        lambda metadata, tensors: metadata.update(tree="{"),
        lambda metadata, tensors: metadata.update(tree="[]"),
        lambda metadata, tensors: metadata.update(band="{}"),
        lambda metadata, tensors: metadata.update(format="one"),
        lambda metadata, tensors: tensors.pop("0"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(change, tmp_path):
    band = fitted(engine=Exact())
    band.save(tmp_path / "x.band")
    before = (tmp_path / "x.band").read_bytes()
    rewritten(tmp_path / "x.band", change)
    assert (tmp_path / "x.band").read_bytes() != before
    with pytest.raises(ArtefactError):
        PredictionIntervals.load(tmp_path / "x.band", band.model)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A file, what is in it, and what it predicts."""
    path = tmp_path_factory.mktemp("sound") / "x.band"
    band = fitted(mlp(hidden=40), RobustFrequentDirections(5)).calibrate(*regression(40, seed=5), tune=False)
    band.save(path)
    return path, path.read_bytes(), band


def loads_right_or_is_refused(sound, content):
    path, _, band = sound
    path.write_bytes(content)
    try:
        loaded = PredictionIntervals.load(path, band.model)
    except ArtefactError:
        return
    assert same(band, loaded)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_flipped_bytes_never_load_silently_wrong(sound, data):
    content = bytearray(sound[1])
    header = int.from_bytes(content[:8], "little") + 8  # half of the damage is done there
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.one_of(st.integers(0, header - 1), st.integers(0, len(content) - 1)))
        content[place] ^= data.draw(st.integers(1, 255))
    loads_right_or_is_refused(sound, bytes(content))


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_cuts_and_insertions_never_load_silently_wrong(sound, data):
    content = sound[1]
    start = data.draw(st.integers(0, len(content) - 1))
    stop = data.draw(st.one_of(st.just(len(content)), st.integers(start, len(content))))
    loads_right_or_is_refused(sound, content[:start] + data.draw(st.binary(max_size=20)) + content[stop:])


def test_every_cut_through_the_header_is_refused(sound):
    path, content, band = sound
    for end in range(0, 600, 7):
        path.write_bytes(content[:end])
        with pytest.raises(ArtefactError):
            PredictionIntervals.load(path, band.model)


def test_the_package_has_no_pickle():
    for path in Path(deltaband.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"pickle\.(dump|load|Pickler|Unpickler)|\b(dill|joblib|marshal|shelve)\b", text), path
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(call), path
