"""Lists and Datasets of objects, which a collate function makes batches of, and opaque batches."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tests.reference as reference
from deltaband import ClassificationIntervals, Exact, OpaqueBatch, PredictionIntervals, RandomProjection
from deltaband import storage as band_storage
from deltaband.data.items import Items, leaves
from deltaband.data.row_record import pair_hashes
from tests.support.graphs import MessagePassing, Molecule, collate, molecules

DAMPING = 0.3
pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")


class Molecules(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def network(outputs=1):
    torch.manual_seed(0)
    return MessagePassing(outputs=outputs)


def dense(model, items):
    return reference.jacobians(model.double().eval(), [(double(collate([each])[0]),) for each in items])


def double(graph):
    return {**graph, "atoms": graph["atoms"].double()}


def test_variances_of_items_are_those_of_the_dense_formula():
    model, items = network(), molecules(120)
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact()).fit(items[:100], collate=collate)
    q, leverage = band.variance(items[100:]), band.leverage(items[100:])
    assert q.shape == (20,)
    assert isinstance(q, torch.Tensor)  # as there are tensors in the items
    J, new = dense(model, items[:100]), dense(model, items[100:])
    expected, h, p_star = reference.answers(J, DAMPING, new)
    np.testing.assert_allclose(q, expected[:, 0], rtol=1e-4)
    np.testing.assert_allclose(leverage, h[:, 0], rtol=1e-4)
    assert band.effective_parameters_ == pytest.approx(p_star, rel=1e-4)


@pytest.mark.parametrize("engine", [Exact(), RandomProjection(64), "robust-frequent-directions", "nystrom"])
def test_lists_datasets_opaque_batches_and_batches_of_items_give_one_band(engine):
    model, items = network(), molecules(150)
    loader = DataLoader(Molecules(items), batch_size=40, collate_fn=list)

    def band(**options):
        return PredictionIntervals(model, damping=DAMPING, engine=engine, **options)

    expected = band(collate=collate).fit(items).predict(items)
    of_dataset = band(collate=collate).fit(Molecules(items)).predict(Molecules(items))
    assert torch.equal(of_dataset.upper, expected.upper)
    by_items = band(batch=lambda some: (Items.of_items(some, collate), collate(some)[1])).fit(loader)
    opaque = band(batch=lambda some: (OpaqueBatch((collate(some)[0],), len(some)), collate(some)[1])).fit(loader)
    tolerance = 1e-4 if isinstance(engine, Exact | RandomProjection) else 0.05  # others depend on how rows come
    for found in (by_items, opaque):
        intervals = found.predict(loader)
        assert torch.allclose(intervals.mean, expected.mean, rtol=1e-4, atol=1e-5)
        assert torch.allclose(intervals.width, expected.width, rtol=tolerance)
    assert opaque.predict(OpaqueBatch((collate(items[:5])[0],), 5)).mean.shape == (5,)


def test_parts_calibration_evaluation_reports_and_files_take_items(tmp_path):
    model, items = network(), molecules(300)
    whole = PredictionIntervals(model, damping=DAMPING, collate=collate).fit(items[:200])
    parts = PredictionIntervals(model, damping=DAMPING, collate=collate)
    parts.partial_fit(items[:120]).partial_fit(items[120:200])
    assert torch.allclose(whole.variance(items[200:]), parts.variance(items[200:]), rtol=1e-5)
    whole.calibrate(items[200:])
    scores = whole.evaluate(items[200:])
    assert "95" in str(scores)
    X, y = items[200:], collate(items[200:])[1]
    assert np.isfinite(whole.evaluate(X, y).rmse).all()
    assert whole.predict_distribution(items[:3]).quantile(0.5).shape[0] == 3
    assert whole.covariance(items[:3]).shape == (3, 3)
    assert whole.share_seen_in_training(items[:50], y=collate(items[:50])[1]) == 1.0
    assert whole.share_seen_in_training(items[200:], y=y) == 0.0
    whole.save(tmp_path / "band")
    again = band_storage.load(tmp_path / "band", model, collate=collate)
    assert torch.equal(again.predict(items[:5]).lower, whole.predict(items[:5]).lower)
    assert torch.equal(
        band_storage.load(tmp_path / "band", model, collate=collate).variance(items[:5]), whole.variance(items[:5])
    )
    with pytest.raises(TypeError, match="no file holds rows that are items"):
        whole.save(tmp_path / "other", sample=True)


def test_a_classifier_takes_items_too():
    model, items = network(outputs=3), molecules(90)

    def with_labels(some):
        return collate(some)[0], torch.tensor([len(each.atoms) % 3 for each in some])

    band = ClassificationIntervals(model, damping=DAMPING, collate=with_labels).fit(items[:60])
    assert band.predict(items[:7]).probability.mean.shape == (7, 3)
    band.calibrate(items[60:])
    assert band.predict_set(items[:7], level=0.5).shape == (7, 3)


def test_weights_come_third_and_items_of_weight_zero_are_left_out():
    model, items = network(), molecules(60)

    def weighted(some):
        graph, y = collate(some)
        return graph, y, torch.tensor([float(len(each.atoms) > 4) for each in some])

    some = [each for each in items if len(each.atoms) > 4]
    with_weights = PredictionIntervals(model, damping=DAMPING).fit(items, collate=weighted)
    without = PredictionIntervals(model, damping=DAMPING).fit(some, collate=collate)
    assert with_weights.n_rows_ == len(some)
    assert torch.allclose(with_weights.variance(items[:9]), without.variance(items[:9]), rtol=1e-4)


def test_ragged_lists_and_dictionaries_are_items_as_well():
    class OfSets(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = nn.Linear(2, 5), nn.Linear(5, 1)

        def forward(self, sets, scale):
            pooled = [torch.tanh(self.inner(each)).mean(dim=0) for each in sets]
            return self.out(torch.stack(pooled)) * scale[:, None]

    torch.manual_seed(0)
    items = [{"set": torch.randn(1 + i % 4, 2), "scale": 1.0 + i % 2, "y": 0.1 * i} for i in range(30)]

    def of_sets(some):
        scales = torch.tensor([each["scale"] for each in some])
        return ([each["set"] for each in some], scales), torch.tensor([each["y"] for each in some])

    model = OfSets()
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact()).fit(items, collate=of_sets)
    rows = [([each["set"].double()], torch.tensor([each["scale"]]).double()) for each in items]
    J = reference.jacobians(model.double(), rows)
    model.float()
    np.testing.assert_allclose(band.variance(items), reference.answers(J, DAMPING, J)[0][:, 0], rtol=1e-4)


def test_the_users_items_are_not_changed():
    class Careless(MessagePassing):
        def forward(self, graph):
            graph["atoms"] *= 2
            return super().forward(graph)

    torch.manual_seed(0)
    items = molecules(20)
    before = [each.atoms.clone() for each in items]
    PredictionIntervals(Careless(), damping=DAMPING).fit(items, collate=lambda s: collate(s)).predict(items)
    single = PredictionIntervals(Careless(), damping=DAMPING, batch=lambda g: (OpaqueBatch((g[0],), 20), g[1]))
    batch = collate(items)
    atoms = batch[0]["atoms"].clone()
    single.fit([batch])
    assert torch.equal(batch[0]["atoms"], atoms)
    assert all(torch.equal(each.atoms, was) for each, was in zip(items, before, strict=True))


def test_items_are_told_apart_by_what_they_hold():
    items = molecules(6)
    same = [Molecule(each.atoms.clone(), each.bonds, each.energy) for each in items]
    y = torch.zeros(6, 1)
    one, two = (pair_hashes(Items.of_items(each, collate), y) for each in (items, same))
    assert (one == two).all()
    assert len(set(one)) == 6
    same[2].atoms[0, 0] += 1
    assert list(pair_hashes(Items.of_items(same, collate), y) == one) == [True, True, False, True, True, True]


def test_leaves_are_found_in_objects_with_slots_cycles_and_containers():
    class Slots:
        __slots__ = ("a", "b")

    made = Slots()
    made.a, made.b = torch.ones(2), [np.zeros(1), {"c": made}]
    assert [type(leaf).__name__ for leaf in leaves(made)] == ["Tensor", "ndarray", "str"]


@pytest.mark.parametrize(
    ("items", "function", "message"),
    [
        ([], collate, "there are no items"),
        (molecules(9), lambda some: collate(some)[0], "collate must return a pair"),
        (molecules(9), lambda some: (collate(some)[0], None), "targets are missing"),
        (molecules(9), lambda some: collate(some)[::-1], "targets are in the wrong place"),
        (molecules(9), lambda some: (collate(some)[0], collate(some)[1][1:]), r"shape \(8, 1\) for 9 items"),
        (molecules(9), lambda some: (collate(some[1:])[0], collate(some)[1]), "made of 2 items: expected"),
        (molecules(9)[0], collate, "for a single one give"),
        (iter(molecules(9)), collate, "give list"),
        (DataLoader(Molecules(molecules(9))), collate, "instead of a DataLoader"),
        (torch.zeros(3, 2), collate, "a list or a Dataset of items"),
    ],
)
def test_items_and_functions_that_will_not_do_are_refused_with_what_to_do(items, function, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PredictionIntervals(network(), damping=DAMPING).fit(items, collate=function)


def test_checkpoints_and_exports_of_items_are_refused(tmp_path):
    items = molecules(12)
    band = PredictionIntervals(network(), damping=DAMPING, collate=collate)
    with pytest.raises(TypeError, match="no file holds rows that are items"):
        band.fit(items, checkpoint=tmp_path / "c", checkpoint_every=0)
    with pytest.raises(ValueError, match="cannot be exported"):
        band.fit(items).export(tmp_path / "band.pt2")


def test_a_wrong_number_of_items_in_an_opaque_batch_is_told():
    items = molecules(12)
    batch = collate(items)
    for n, message in ((11, "should hold 11 items"), (-1, "n_items must be"), (True, "n_items must be")):
        band = PredictionIntervals(
            network(), damping=DAMPING, batch=lambda g, n=n: (OpaqueBatch((g[0],), n), g[1][: max(n, 1)])
        )
        with pytest.raises(ValueError, match=message):
            band.fit([batch])


class OneNumberForEachAtom(MessagePassing):
    """Its graphs have equally many atoms, until a batch comes whose graphs are larger."""

    def forward(self, graph):
        return self.atom(graph["atoms"])[:, :1].reshape(graph["n"], -1)


def test_shapes_that_change_between_batches_are_told_with_the_rows():
    def batch_of(n, atoms):
        return [Molecule(torch.randn(atoms, 4), torch.zeros(2, 0, dtype=torch.long), torch.zeros(3)) for _ in range(n)]

    def opaque(some):
        return OpaqueBatch((collate(some)[0],), len(some)), torch.zeros(len(some), 3)

    band = PredictionIntervals(OneNumberForEachAtom(), damping=DAMPING, parameters=["atom.*"], batch=opaque)
    with pytest.raises(ValueError, match=r"rows \d+ to \d+: the network returns"):
        band.fit([batch_of(30, 3), batch_of(30, 4)])
