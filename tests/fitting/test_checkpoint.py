"""A fit that was ended goes on, and ends in the band that it would have ended in."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from deltaband import (
    ArtefactError,
    DeltabandWarning,
    Exact,
    FrequentDirections,
    ImportantDirections,
    Nystrom,
    PredictionIntervals,
    RandomProjection,
    RobustFrequentDirections,
)
from deltaband.data.row_record import RowRecord
from deltaband.engines import Problem
from deltaband.engines.directions import magnitude
from tests.support.networks import mlp, regression

pytestmark = pytest.mark.filterwarnings(
    "ignore:the network has p", "ignore:rank=", "ignore:n − p", "ignore:.*accurate", "ignore:the sketch may"
)
N = 200
X, Y = regression(N)
NEW = regression(20, seed=3)[0]
ENGINES = [
    "auto",
    Exact(),
    RandomProjection(20),
    Nystrom(30),
    Nystrom(30, choose="leverage"),
    ImportantDirections(10),
    RobustFrequentDirections("auto"),
    FrequentDirections(10),
]


class EndedError(Exception):
    """What ends a fit."""


class Ending(DataLoader):
    """A loader that is ended after some of its batches, each time it is read from the `last` time on."""

    def __init__(self, *args, after=None, last=1, **options):
        super().__init__(*args, **options)
        self.after, self.last, self.times, self.given = after, last, 0, 0

    def __iter__(self):
        self.times += 1
        for i, batch in enumerate(super().__iter__()):
            if self.after is not None and i >= self.after and self.times >= self.last:
                raise EndedError
            self.given += 1
            yield batch


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("deltaband.network.network.CHUNK_ROWS_AT_MOST", 16)
    monkeypatch.setattr("deltaband.fitting.accumulator.PRODUCT_ROWS", 32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "fit.ckpt"


def loader(after=None, last=1, x=X, y=Y, batch_size=10, **options):
    return Ending(TensorDataset(x, y), batch_size=batch_size, after=after, last=last, **options)


def made(engine="auto", model=None, **options):
    options = options or {"weight_decay": 1e-2}
    return PredictionIntervals(model or mlp(), engine=engine, **options)


def ended(band, path, after=12, last=1, checkpoint_every=0, **options):
    with pytest.raises(EndedError):
        band.fit(loader(after, last, **options), checkpoint=path, checkpoint_every=checkpoint_every, progress=False)
    assert path.exists()
    return rows_in(path)


def rows_in(path):
    with safe_open(path, framework="pt") as file:
        tree = dict(json.loads(file.metadata()["tree"])["dict"])
    return dict(tree["rows"]["dict"])["sums"]["fields"]["n_rows"]


def answers(band, x=NEW):
    found = [*band.predict(x, [0.5, 0.9]), band.variance(x), band.leverage(x)]
    numbers = [band.effective_parameters_, band.noise_std_, band.error_bound_, band.n_rows_, band.damping_]
    return [torch.as_tensor(each) for each in found + numbers]


def identical(band, other, x=NEW):
    for mine, theirs in zip(answers(band, x), answers(other, x), strict=True):
        assert torch.equal(mine, theirs) or (mine.isnan() & theirs.isnan()).all()
    assert band.summary() == other.summary()
    return True


# --- the same band


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
@pytest.mark.parametrize("hidden", [8, 80])  # p = 41 and 401
def test_what_was_ended_goes_on_and_ends_in_the_same_band(engine, hidden, path):
    passes = 2 if isinstance(engine, Nystrom) else 1
    whole = made(engine, mlp(hidden=hidden)).fit(loader(), progress=False)
    band = made(engine, mlp(hidden=hidden))
    assert ended(band, path, last=passes) >= 96
    assert identical(band.fit(loader(), checkpoint=path, progress=False), whole)


def test_it_may_be_ended_again_and_again(path):
    band, seen = made(ImportantDirections(10)), []
    for after in (3, 8, 8, 13, 19):
        seen.append(ended(band, path, after))
    assert seen == [16, 80, 80, 128, 176]  # what came in chunks of 16
    band.fit(loader(), checkpoint=path, progress=False)
    assert identical(band, made(ImportantDirections(10)).fit(loader(), progress=False))


def test_rows_that_were_taken_in_are_not_taken_in_again(path, monkeypatch):
    taken, update = [], RowRecord.update
    monkeypatch.setattr(RowRecord, "update", lambda self, x, y: taken.append(len(x)) or update(self, x, y))
    assert ended(made(), path, after=19) == 176
    taken.clear()
    made().fit(loader(), checkpoint=path, progress=False)
    assert sum(taken) == N - 176


@pytest.mark.parametrize("options", [{"outputs": [2, 0]}, {"per_output": True}, {"parameters": ["2.*"]}])
def test_several_outputs_and_chosen_parameters(options, path):
    def fresh():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        return PredictionIntervals(model, weight_decay=1e-2, **options)

    y = torch.stack([Y, Y**2, -Y], dim=1)
    whole = fresh().fit(loader(y=y), progress=False)
    band = fresh()
    # with per_output=True the data are read for each output: the first has been, the second is under way
    ended(band, path, last=2 if options == {"per_output": True} else 1, y=y)
    again = loader(y=y)
    assert identical(band.fit(again, checkpoint=path, progress=False), whole)
    assert again.times == (2 if options == {"per_output": True} else 1)


def test_rows_of_which_the_inputs_alone_are_kept(path, monkeypatch):
    monkeypatch.setattr(Problem, "recomputed_bytes", property(lambda p: 10 * p.factor_bytes))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1)).double()
    options = {"engine": Exact(), "memory": 2_000_000, "damping": 1.0}
    whole = PredictionIntervals(model, **options).fit(loader(), progress=False)
    band = PredictionIntervals(model, **options)
    assert band.plan(X, Y).chosen.problem.recomputed
    assert ended(band, path) > 96
    assert identical(band.fit(loader(), checkpoint=path, progress=False), whole)


def test_inputs_of_several_shapes(path):
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return self.inner(x.mean(dim=1))

    batches = [(X[i : i + 9, None].expand(-1, 1 + i % 2, -1).contiguous(), Y[i : i + 9]) for i in range(0, N, 9)]

    def ending():
        yield from batches[:15]
        raise EndedError

    with pytest.raises(EndedError):
        made(model=Mean()).fit(ending(), n_rows=N, checkpoint=path, checkpoint_every=0, progress=False)
    assert rows_in(path) == 126
    band = made(model=Mean()).fit(iter(batches), n_rows=N, checkpoint=path, progress=False)
    whole = made(model=Mean()).fit(iter(batches), n_rows=N, progress=False)
    assert identical(band, whole, NEW[:, None])


def test_arrays_are_read_again_without_a_loader(path, monkeypatch):
    from deltaband.fitting.checkpoint import Checkpoint

    def end(self, *args):
        write(self, *args)
        if args[-1].n_rows > 100:
            raise EndedError

    write = Checkpoint.write
    monkeypatch.setattr(Checkpoint, "write", end)
    with pytest.raises(EndedError):
        made().fit(X, Y, checkpoint=path, checkpoint_every=0, progress=False)
    monkeypatch.setattr(Checkpoint, "write", write)
    assert rows_in(path) == 112
    assert identical(made().fit(X, Y, checkpoint=path, progress=False), made().fit(X, Y, progress=False))


# --- the order of the rows


@pytest.mark.parametrize("generators", ["torch", "loader", "sampler"])
@pytest.mark.parametrize("engine", [Exact(), Nystrom(30), ImportantDirections(10)], ids=repr)
def test_a_random_order_is_had_again(generators, engine, path):
    def shuffled(**options):
        if generators == "torch":
            torch.manual_seed(5)
            return loader(shuffle=True, **options)
        generator = torch.Generator().manual_seed(5)
        if generators == "loader":
            return loader(shuffle=True, generator=generator, **options)
        return loader(sampler=RandomSampler(X, generator=generator), **options)

    whole = made(engine).fit(shuffled(), progress=False)
    with pytest.raises(EndedError):
        made(engine).fit(
            shuffled(after=12, last=2 if isinstance(engine, Nystrom) else 1),
            checkpoint=path,
            checkpoint_every=0,
            progress=False,
        )
    after = shuffled()
    torch.manual_seed(99)  # another process is elsewhere
    for generator in {id(g): g for g in (after.generator, after.sampler.generator) if g is not None}.values():
        generator.manual_seed(77)
    assert identical(made(engine).fit(after, checkpoint=path, progress=False), whole)


def test_the_order_of_batches_that_a_sampler_makes(path):
    def batches(after=None):
        sampler = BatchSampler(RandomSampler(X, generator=torch.Generator().manual_seed(4)), 10, False)
        return loader(after, sampler=sampler, batch_size=None)

    whole = made(ImportantDirections(10), damping=1.0).fit(batches(), n_rows=N, progress=False)
    with pytest.raises(EndedError):
        made(ImportantDirections(10), damping=1.0).fit(
            batches(12), n_rows=N, checkpoint=path, checkpoint_every=0, progress=False
        )
    again = batches()
    again.sampler.sampler.generator.manual_seed(5)
    band = made(ImportantDirections(10), damping=1.0).fit(again, n_rows=N, checkpoint=path, progress=False)
    assert identical(band, whole)


def test_workers_that_stay(path):
    def workers(after=None):
        torch.manual_seed(5)
        return loader(after, 2, shuffle=True, num_workers=1, persistent_workers=True)

    rows = workers(12)
    with pytest.raises(EndedError):
        made(Nystrom(30)).fit(rows, checkpoint=path, checkpoint_every=0, progress=False)
    assert rows_in(path) >= 96
    band = made(Nystrom(30)).fit(workers(), checkpoint=path, progress=False)
    assert band.n_rows_ == N


def test_an_order_that_cannot_be_had_again_is_refused(path):
    class Wild(torch.utils.data.Sampler):
        def __len__(self):
            return N

        def __iter__(self):
            return iter(np.random.default_rng().permutation(N).tolist())

    band = made()
    ended(band, path, sampler=Wild())
    with pytest.raises(ArtefactError, match=r"other data, or to the same rows in another order: row \d+ "):
        band.fit(loader(sampler=Wild()), checkpoint=path, progress=False)
    assert path.exists()


# --- what it belongs to


def other_weights():
    model = mlp()
    with torch.no_grad():
        model[2].bias += 1e-9
    return model


@pytest.mark.parametrize(
    ("band", "words"),
    [
        (lambda: made(model=other_weights()), r"another model: first '2\.bias'"),
        (lambda: made(model=mlp(hidden=9)), r"another model: first '0\.weight'"),
        (lambda: made(Exact()), r"with engine='auto', and this one has Exact\(\)"),
        (lambda: made(weight_decay=1e-3), r"with weight_decay=0\.01, and this one has 0\.001"),
        (lambda: made(weight_decay=1e-2, parameters="last"), "with parameters='all'"),
        (lambda: made(weight_decay=1e-2, target_transform=(1.0, 2.0)), "with target_transform=None"),
        (lambda: made(weight_decay=1e-2, output=lambda y: y), "with output=None"),
    ],
)
def test_another_model_or_engine_is_refused(band, words, path):
    ended(made(), path)
    before = path.read_bytes()
    with pytest.raises(ArtefactError, match=f"{words}.*delete the file to start over"):
        band().fit(loader(), checkpoint=path, checkpoint_every=0, progress=False)
    assert path.read_bytes() == before


def test_what_is_neither_weights_nor_options_is_told_by_the_answers(path):
    def leaky(slope):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(slope), nn.Linear(8, 1)).double()

    ended(made(model=leaky(0.01)), path)
    with pytest.raises(ArtefactError, match="another network, as other numbers show for the first rows"):
        made(model=leaky(0.5)).fit(loader(), checkpoint=path, progress=False)
    path.unlink()
    path.with_name("fit.ckpt.previous").unlink()
    ended(made(weight_decay=1e-2, output=lambda y: y), path)
    with pytest.raises(ArtefactError, match="another network"):
        made(weight_decay=1e-2, output=lambda y: 5 * y).fit(loader(), checkpoint=path, progress=False)


class Picked:
    def __call__(self, y):
        return y


@pytest.mark.parametrize("output", [Picked, lambda: partial(lambda y, times: times * y, times=1)])
def test_functions_that_have_no_name(output, path):
    ended(made(weight_decay=1e-2, output=output()), path)
    band = made(weight_decay=1e-2, output=output()).fit(loader(), checkpoint=path, progress=False)
    assert identical(band, made().fit(loader(), progress=False))


def test_a_score_of_ones_own(path):
    def own(d, damping):
        return d**2

    whole = made(ImportantDirections(10, score=own)).fit(loader(), progress=False)
    ended(made(ImportantDirections(10, score=own)), path)
    band = made(ImportantDirections(10, score=own)).fit(loader(), checkpoint=path, progress=False)
    assert identical(band, whole)


def test_settings_of_an_engine_are_part_of_it(path):
    ended(made(ImportantDirections(10)), path)
    with pytest.raises(ArtefactError, match=r"tail='none'.*tail='estimate'"):
        made(ImportantDirections(10, tail="estimate")).fit(loader(), checkpoint=path, progress=False)
    with pytest.raises(ArtefactError, match=r"score=importance.*score=magnitude"):
        made(ImportantDirections(10, score=magnitude)).fit(loader(), checkpoint=path, progress=False)


def test_more_memory_may_be_given(path):
    ended(made(memory=1e9, weight_decay=1e-2), path)
    assert made(memory=2e9, weight_decay=1e-2).fit(loader(), checkpoint=path, progress=False).n_rows_ == N


@pytest.mark.parametrize("row", [0, 47, 95])
def test_other_data_are_refused_by_the_first_row_that_differs(row, path):
    band = made().fit(X[:50], Y[:50], progress=False)
    was = answers(band)
    ended(band, path)
    x, y = X.clone(), Y.clone()
    x[row, 1] += 1e-12
    with pytest.raises(ArtefactError, match=rf"row {row} differs\."):
        band.fit(loader(x=x), checkpoint=path, progress=False)
    y[row] += 1e-3
    with pytest.raises(ArtefactError, match=rf"row {row} differs\."):
        band.fit(loader(y=y), checkpoint=path, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(answers(band), was, strict=True))


def test_fewer_or_more_rows_are_refused(path):
    ended(made(), path)
    with pytest.raises(ArtefactError, match="fit to 200 rows, and these are 150"):
        made().fit(X[:150], Y[:150], checkpoint=path, progress=False)

    def batches(n, end):
        for i in range(0, n, 10):
            yield X[i : i + 10], Y[i : i + 10]
        if end:
            raise EndedError

    with pytest.raises(EndedError):
        made().fit(
            batches(120, True), checkpoint=(other := path.with_name("other.ckpt")), checkpoint_every=0, progress=False
        )
    with pytest.raises(ArtefactError, match="had taken in 96 rows, and these are 70"):
        made().fit(batches(70, False), checkpoint=other, progress=False)
    assert made().fit(batches(N, False), checkpoint=other, progress=False).n_rows_ == N


# --- the file


def test_it_is_there_as_long_as_the_fit_is_not_finished(path):
    ended(made(), path)
    assert {each.name for each in path.parent.iterdir()} == {"fit.ckpt", "fit.ckpt.previous"}
    made().fit(loader(), checkpoint=path, checkpoint_every=0, progress=False)
    assert not list(path.parent.iterdir())


def test_a_warning_that_is_an_error_does_not_cost_the_rows(path):
    band = made(RobustFrequentDirections(1))
    with pytest.warns(DeltabandWarning) as said:
        band.fit(loader(), progress=False)
    assert said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeltabandWarning):
            made(RobustFrequentDirections(1)).fit(loader(), checkpoint=path, checkpoint_every=0, progress=False)
    assert rows_in(path) == N
    with pytest.warns(DeltabandWarning):
        again = made(RobustFrequentDirections(1)).fit(loader(), checkpoint=path, progress=False)
    assert identical(again, band)


def test_nothing_is_written_before_it_is_time(path):
    band = made()
    with pytest.raises(EndedError):
        band.fit(loader(12), checkpoint=path, progress=False)
    assert not list(path.parent.iterdir())


def test_writing_takes_a_tenth_of_the_time_at_most(path, monkeypatch):
    from deltaband.fitting import checkpoint

    clock = itertools.count()
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: float(next(clock)))
    written = []
    monkeypatch.setattr(checkpoint.Checkpoint, "write", lambda self, *args: written.append(args[-1].n_rows))
    made().fit(loader(), checkpoint=path, checkpoint_every=1, progress=False)
    # each write takes two seconds of this clock, each look at it one: the next is written after ten
    assert written == [16, 176]


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:-9] + b"x" + b[-8:]])
def test_a_damaged_file_falls_back_to_the_one_before(damage, path):
    whole = made().fit(loader(), progress=False)
    ended(made(), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(DeltabandWarning, match=r"damaged.*resumes from fit\.ckpt\.previous"):
        band = made().fit(loader(), checkpoint=path, progress=False)
    assert identical(band, whole)


def test_a_file_that_is_not_there_falls_back_too(path):
    ended(made(), path)
    path.unlink()  # as after a kill between the two renames
    computed = made().fit(loader(), checkpoint=path, progress=False)
    assert identical(computed, made().fit(loader(), progress=False))
    assert not list(path.parent.iterdir())


def test_a_damaged_file_does_not_take_the_place_of_the_one_before(path):
    ended(made(), path)
    previous = path.with_name("fit.ckpt.previous")
    good = previous.read_bytes()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(DeltabandWarning, match="damaged"), pytest.raises(EndedError):
        made().fit(loader(12), checkpoint=path, checkpoint_every=1e9, progress=False)
    assert previous.read_bytes() == good
    with pytest.warns(DeltabandWarning, match="damaged"):
        ended(made(), path, 13)
    assert rows_in(path) == 128
    assert rows_in(previous) == 112


def test_another_file_beside_the_one_before_is_refused_and_stays(path):
    ended(made(), path)
    for other in ("a,b\n1,2\n", "a table, in place of the checkpoint: 1, 2, 3"):
        path.write_text(other)
        with pytest.raises(ArtefactError, match="not a checkpoint of deltaband"):
            made().fit(loader(), checkpoint=path, checkpoint_every=0, progress=False)
        assert path.read_text() == other


def test_where_both_are_damaged_nothing_is_overwritten(path):
    ended(made(), path)
    previous = path.with_name("fit.ckpt.previous")
    for each in (path, previous):
        each.write_bytes(each.read_bytes()[:100])
    before = path.read_bytes(), previous.read_bytes()
    with pytest.raises(ArtefactError, match=r"previous is not a checkpoint of deltaband, or it is damaged"):
        made().fit(loader(), checkpoint=path, checkpoint_every=0, progress=False)
    assert (path.read_bytes(), previous.read_bytes()) == before


def test_files_that_are_something_else_are_refused_and_stay(path):
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ArtefactError, match="not a checkpoint of deltaband"):
        made().fit(X, Y, checkpoint=path, checkpoint_every=0, progress=False)
    assert path.read_text() == "a,b\n1,2\n"
    made().fit(X, Y, progress=False).save(path)
    before = path.read_bytes()
    with pytest.raises(ArtefactError, match="not a checkpoint of deltaband"):
        made().fit(X, Y, checkpoint=path, checkpoint_every=0, progress=False)
    assert path.read_bytes() == before
    path.unlink()
    ended(made(), path)
    with pytest.raises(ArtefactError, match="not a band of deltaband"):
        PredictionIntervals.load(path, mlp())


def test_a_place_that_cannot_be_written_is_said_before_a_row_is_read(tmp_path):
    rows = loader()
    for path, error in ((tmp_path, IsADirectoryError), (tmp_path / "no" / "fit.ckpt", FileNotFoundError)):
        with pytest.raises(error):
            made().fit(rows, checkpoint=path, progress=False)
    assert rows.times == 0


@pytest.mark.parametrize("every", [-1, float("nan"), float("inf"), "10", None, True])
def test_every_is_a_number_of_seconds(every, path):
    with pytest.raises(ValueError, match="every must be a number of seconds ≥ 0"):
        made().fit(X, Y, checkpoint=path, checkpoint_every=every, progress=False)


def test_a_full_disk_ends_no_fit(path, monkeypatch):
    from deltaband.storage import container

    whole = made().fit(loader(), progress=False)
    kept = ended(made(), path, 6)

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(container, "write", full)
    before = path.read_bytes()
    with (
        pytest.raises(EndedError),
        pytest.warns(DeltabandWarning, match="not written at row .*, and the fit continues: .*No space"),
    ):
        made().fit(loader(12), checkpoint=path, checkpoint_every=0, progress=False)
    assert path.read_bytes() == before
    assert rows_in(path) == kept
    with pytest.warns(DeltabandWarning, match="not written"):
        assert identical(made().fit(loader(), checkpoint=path, checkpoint_every=0, progress=False), whole)


def test_the_model_is_as_it_was(path):
    model = mlp().train()
    weights = [w.clone() for w in model.parameters()]
    ended(made(model=model), path)
    made(model=model).fit(loader(), checkpoint=path, progress=False)
    assert model.training
    assert all(torch.equal(w, was) for w, was in zip(model.parameters(), weights, strict=True))
    assert all(w.requires_grad and w.grad is None for w in model.parameters())


KILLED = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
sys.path[:0] = [{root!r}]
from tests.support.networks import mlp, regression
import deltaband.network.network
from deltaband import ImportantDirections, PredictionIntervals

deltaband.network.network.CHUNK_ROWS_AT_MOST = 16
X, Y = regression(200)
torch.manual_seed(int(sys.argv[2]))

class Killing(TensorDataset):
    given = 0
    def __getitem__(self, i):
        Killing.given += 1
        if Killing.given == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)

band = PredictionIntervals(mlp(), weight_decay=1e-2, engine=ImportantDirections(10))
torch.manual_seed(int(sys.argv[2]))
rows = DataLoader(Killing(X, Y), batch_size=10, shuffle=True)
print(band.fit(rows, checkpoint="fit.ckpt", checkpoint_every=0, progress=False).variance(X[:9]).tolist())
"""


def test_after_a_kill_the_same_program_goes_on(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(KILLED).format(root=str(Path(__file__).parents[2])))

    def run(after, seed):
        command = [sys.executable, "program.py", str(after), str(seed)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)

    whole = run(0, seed=1).stdout
    assert whole
    killed = run(150, seed=1)
    assert killed.returncode == -signal.SIGKILL
    assert rows_in(tmp_path / "fit.ckpt") == 128
    assert run(0, seed=2).stdout == whole
    assert not list(tmp_path.glob("*.ckpt*"))


def test_rows_of_other_weights_are_refused(path):
    def fit(weights, after=None):
        rows = Ending(TensorDataset(X, Y, weights), batch_size=10, after=after)
        band = PredictionIntervals(mlp(), weight_decay=1e-2, batch=lambda b: (b[0], b[1], b[2]))
        return band.fit(rows, checkpoint=path, checkpoint_every=0, progress=False)

    weights = torch.rand(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    with pytest.raises(EndedError):
        fit(weights, after=12)
    with pytest.raises(ArtefactError, match="give the same weights"):
        fit(2 * weights)
    resumed = fit(weights)
    path.unlink(missing_ok=True)
    np.testing.assert_allclose(resumed.predict(NEW).upper, fit(weights).predict(NEW).upper, rtol=1e-9)
