"""Sets of labels after `calibrate`: how often they hold the true one, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from deltaband import ClassificationIntervals, DeltabandWarning
from deltaband.calibration.labels import probabilities, scores


class Affine(nn.Module):
    """Logits as they are in the inputs, times a factor: badly calibrated probabilities with a known order."""

    def __init__(self, n_classes: int, n_returned: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(n_classes, n_returned or n_classes)
        with torch.no_grad():
            self.layer.weight.copy_(2 * torch.eye(n_classes)[: n_returned or n_classes])
            self.layer.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def draw(n: int, n_classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose label is drawn with the softmax of x; of two classes with one logit, with its sigmoid."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, n_classes)) * 1.5
    p = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    if n_classes == 1:
        return x.astype(np.float32), (rng.uniform(size=n) < 1 / (1 + np.exp(-x[:, 0]))).astype(np.int64)
    return x.astype(np.float32), np.array([rng.choice(n_classes, p=row) for row in p])


def fitted(n_classes: int = 4) -> ClassificationIntervals:
    X, y = draw(300, n_classes, seed=0)
    return ClassificationIntervals(Affine(n_classes), damping=5.0).fit(X, y, progress=False)


@pytest.fixture(scope="module")
def band() -> ClassificationIntervals:
    return fitted().calibrate(*draw(200, 4, seed=1))


def test_sets_do_not_depend_on_a_damping_that_is_not_known() -> None:
    model, (X, y), (new, _) = Affine(4), draw(300, 4, seed=0), draw(50, 4, seed=2)
    with pytest.raises(
        ValueError, match=r"weight decay of AdamW is not added.*for these alone damping=1\.0 is as good"
    ):
        ClassificationIntervals(model, optimizer=torch.optim.AdamW(model.parameters()))
    bands = [ClassificationIntervals(model, damping=damping).fit(X, y, progress=False) for damping in (1.0, 30.0)]
    one, other = (band.calibrate(*draw(200, 4, seed=1)).predict_set(new, 0.8) for band in bands)
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("method", ["lac", "aps"])
@pytest.mark.parametrize("n_classes", [1, 4])
def test_sets_hold_the_true_label_as_often_as_they_say(n_classes: int, method: str, by_class: bool) -> None:
    classifier, n, level = fitted(n_classes), 100, 0.8
    hits: list[np.ndarray] = []
    for seed in range(60):
        X, y = draw(n, n_classes, seed=1000 + seed)
        classifier.calibrate(X, y, method=method, by_class=by_class, seed=seed)  # type: ignore[arg-type]
        X, y = draw(200, n_classes, seed=5000 + seed)
        sets = classifier.predict_set(X, level, allow_empty=True)
        hit = sets[np.arange(len(y)), y]
        hits.append(
            np.array([hit[y == c].mean() for c in range(sets.shape[1])]) if by_class else hit.mean(keepdims=True)
        )
    mean, error = np.mean(hits, axis=0), np.std(hits, axis=0) / np.sqrt(len(hits))
    assert (mean > level - 4 * error).all()
    n_rows = n if not by_class else n / max(n_classes, 2) / 1.6  # calibration rows of the smallest class, about
    assert (mean < level + 1 / n_rows + 4 * error).all()  # not by giving everything


def test_scores_are_those_of_a_naive_loop() -> None:
    p, u = np.random.default_rng(0).dirichlet(np.ones(5), size=20), np.random.default_rng(1).uniform(size=20)
    lac, aps = scores("lac", p, u), scores("aps", p, u)
    for i in range(20):
        for c in range(5):
            assert lac[i, c] == 1 - p[i, c]
            above = sum(p[i, k] for k in range(5) if p[i, k] > p[i, c])
            assert aps[i, c] == pytest.approx(above + u[i] * p[i, c], abs=1e-12)


def test_probabilities_of_one_logit_are_those_of_both_classes() -> None:
    z = torch.tensor([[0.0], [2.0], [-800.0]])
    np.testing.assert_allclose(probabilities(z), [[0.5, 0.5], [0.1192029, 0.8807971], [1.0, 0.0]], atol=1e-6)


def test_a_set_is_empty_only_where_that_was_asked_for() -> None:
    X, y = draw(400, 4, seed=1)
    classifier = fitted().calibrate(X, y)
    assert not classifier.predict_set(X, 0.2, allow_empty=True).any(axis=1).all()
    sets = classifier.predict_set(X, 0.2)
    assert sets.any(axis=1).all()
    assert (sets >= classifier.predict_set(X, 0.2, allow_empty=True)).all()


def test_sets_do_not_depend_on_the_batch_and_are_of_the_kind_of_the_inputs() -> None:
    X, y = draw(200, 4, seed=1)
    classifier = fitted().calibrate(X, y, method="aps", seed=3)
    x = draw(50, 4, seed=2)[0]
    sets = classifier.predict_set(x, [0.5, 0.9])
    assert sets.shape == (50, 4, 2)
    assert sets.dtype == bool
    assert (sets[:, :, 1] >= sets[:, :, 0]).all()
    alone = np.concatenate([classifier.predict_set(row[None], [0.5, 0.9]) for row in x])
    assert np.array_equal(alone, sets)
    given = classifier.predict_set(torch.from_numpy(x), 0.9)
    assert isinstance(given, torch.Tensor)
    assert np.array_equal(given.numpy(), sets[:, :, 1])
    assert classifier.predict_set(x[:0], 0.9).shape == (0, 4)


def test_a_file_holds_the_calibration(band: ClassificationIntervals, tmp_path: Path) -> None:
    band.save(tmp_path / "band")
    loaded = ClassificationIntervals.load(tmp_path / "band", band.model)
    x = draw(50, 4, seed=2)[0]
    assert np.array_equal(loaded.predict_set(x, [0.8, 0.9]), band.predict_set(x, [0.8, 0.9]))
    assert "label sets" in loaded.summary()
    assert "LAC, calibrated on 200 rows: levels up to 0.99502" in loaded.summary()


def test_new_training_rows_end_the_calibration() -> None:
    classifier = fitted().calibrate(*draw(100, 4, seed=1))
    with pytest.warns(DeltabandWarning, match="end the calibration"):
        classifier.partial_fit(*draw(50, 4, seed=3))
    with pytest.raises(ValueError, match="call calibrate"):
        classifier.predict_set(draw(5, 4, seed=2)[0])


def test_training_rows_among_the_calibration_rows_are_reported() -> None:
    with pytest.warns(DeltabandWarning, match="100% of the calibration rows were training rows"):
        fitted().calibrate(*draw(300, 4, seed=0))


def test_what_cannot_be_promised_is_refused(band: ClassificationIntervals) -> None:
    X, y = draw(200, 4, seed=1)
    with pytest.raises(ValueError, match=r"200 calibration rows are too few for level 0\.999"):
        band.predict_set(X, 0.999)
    few = fitted().calibrate(
        np.concatenate([X[y != 2], X[y == 2][:3]]), np.concatenate([y[y != 2], [2, 2, 2]]), by_class=True
    )
    with pytest.raises(
        ValueError,
        match=r"class 2 has 3 calibration rows, too few for level 0\.9 by class: it takes at least 9 of each",
    ):
        few.predict_set(X, 0.9)
    unseen = fitted().calibrate(X[y != 2], y[y != 2], by_class=True)
    with pytest.raises(ValueError, match="class 2 has 0 calibration rows"):
        unseen.predict_set(X, 0.5)
    with pytest.raises(ValueError, match="call calibrate"):
        fitted().predict_set(X)


def test_bad_input_is_refused_and_changes_nothing(band: ClassificationIntervals) -> None:
    X, y = draw(50, 4, seed=1)
    before = band.calibration_
    with pytest.raises(ValueError, match="labels must be whole numbers from 0 to 3, one per row, got 4"):
        band.calibrate(X, np.where(y == 3, 4, y))
    with pytest.raises(ValueError, match="NaN in row 7"):
        band.calibrate(np.where(np.arange(50)[:, None] == 7, np.nan, X).astype(np.float32), y)
    with pytest.raises(ValueError, match=r"50.*49|49.*50"):
        band.calibrate(X, y[:49])
    with pytest.raises(TypeError, match="words"):
        band.calibrate(X, y.astype(str))
    with pytest.raises(ValueError, match="method must be 'lac' or 'aps'"):
        band.calibrate(X, y, method="raps")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed"):
        band.calibrate(X, y, seed=-1)
    with pytest.raises(ValueError, match="NaN in row 0"):
        band.predict_set(np.full((2, 4), np.nan, dtype=np.float32))
    with pytest.raises(ValueError, match="level"):
        band.predict_set(X, 1.0)
    assert band.calibration_ is before
