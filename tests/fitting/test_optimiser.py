"""λ from the optimiser that trained the network."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam

from deltaband import ClassificationIntervals, DeltabandWarning, PredictionIntervals
from tests.support.classifiers import classifier, labelled
from tests.support.networks import mlp, regression

X, Y = regression()


def biases_apart(model, decay):
    biases = [w for name, w in model.named_parameters() if name.endswith("bias")]
    others = [w for name, w in model.named_parameters() if not name.endswith("bias")]
    return [{"params": others, "weight_decay": decay}, {"params": biases, "weight_decay": 0.0}]


@pytest.mark.parametrize("kind", [Adam, SGD, NAdam])
@pytest.mark.parametrize("loss", [{}, {"loss": "sum", "batch_size": 10}, {"loss": "half_mean"}])
def test_a_coupled_weight_decay_is_read_from_the_optimiser(kind, loss):
    model = mlp()
    optimiser = kind(model.parameters(), lr=1e-2, weight_decay=0.03)
    band = PredictionIntervals(model, optimizer=optimiser, **loss).fit(X, Y, progress=False)
    told = PredictionIntervals(model, weight_decay=0.03, **loss).fit(X, Y, progress=False)
    assert band.damping_ == told.damping_
    assert band.summary() == told.summary()


def test_classifiers_read_it_too_and_say_where_there_is_none():
    model = classifier(3)
    band = ClassificationIntervals(model, optimizer=Adam(model.parameters(), weight_decay=0.01)).fit(*labelled())
    assert band.damping_ == pytest.approx(0.6)
    with pytest.raises(ValueError, match=r"weight decay of AdamW is not added to the loss; give .* damping=λ"):
        ClassificationIntervals(model, optimizer=AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda w: AdamW(w, weight_decay=0.1), "the weight decay of AdamW is not added to the loss"),
        (
            lambda w: Adam(w, weight_decay=0.1, decoupled_weight_decay=True),
            "the weight decay of Adam is not added to the loss",
        ),
        (lambda w: Adam(w), "Adam was run without weight decay"),
        (lambda w: torch.optim.LBFGS(w), "LBFGS has no weight decay"),
    ],
    ids=["AdamW", "decoupled Adam", "none", "LBFGS"],
)
def test_without_a_coupled_decay_the_band_says_that_it_needs_a_calibration(make, why):
    model = mlp()
    if (
        why.startswith("the weight decay of Adam is")
        and "decoupled_weight_decay" not in Adam([nn.Parameter(X)]).defaults
    ):
        pytest.skip("this torch has no such option")
    band = PredictionIntervals(model, optimizer=make(model.parameters())).fit(X, Y, progress=False)
    assert f"unknown ({why}): predict needs a calibration" in band.summary()
    with pytest.raises(ValueError, match=rf"λ is not known \({why}\).*calibrate"):
        band.predict(X)
    assert "predict needs" not in band.calibrate(*regression(60, seed=1)).summary()
    assert len(band.predict(X)) == 80


def test_of_several_decays_that_of_most_parameters_is_taken_with_a_warning():
    model = mlp()
    with pytest.warns(
        DeltabandWarning, match=r"0\.02 for 32 of 41 parameters and 0 for 9: λ follows from 0\.02"
    ) as said:
        band = PredictionIntervals(model, optimizer=SGD(biases_apart(model, 0.02), lr=0.1))
    assert said[0].filename == __file__
    assert band.fit(X, Y, progress=False).damping_ == pytest.approx(80 * 0.02 / 2)
    frozen_head = PredictionIntervals(model, parameters=["*.weight"], optimizer=SGD(biases_apart(model, 0.02), lr=0.1))
    assert frozen_head.fit(X, Y, progress=False).damping_ == band.damping_  # all that take part have the same decay


def test_an_optimiser_of_another_model_is_refused():
    model = mlp()
    optimiser = Adam(model.parameters(), weight_decay=0.1)
    with pytest.raises(ValueError, match=r"does not have the model's parameter '0\.weight'.*this very model"):
        PredictionIntervals(copy.deepcopy(model), optimizer=optimiser)
    head_only = Adam(model[2].parameters(), weight_decay=0.1)
    with pytest.raises(ValueError, match="parameters= those that were"):
        PredictionIntervals(model, optimizer=head_only)
    band = PredictionIntervals(model, optimizer=head_only, parameters="last").fit(X, Y, progress=False)
    assert band.damping_ == pytest.approx(4.0)
    more = Adam([*model.parameters(), nn.Parameter(torch.zeros(3))], weight_decay=0.1)  # of a loss, for instance
    assert PredictionIntervals(model, optimizer=more).fit(X, Y, progress=False).damping_ == pytest.approx(4.0)


def test_it_goes_with_nothing_else_that_says_what_the_damping_is():
    model = mlp()
    optimiser = Adam(model.parameters(), weight_decay=0.1)
    for other in ({"damping": 1.0}, {"weight_decay": 0.1}):
        with pytest.raises(ValueError, match="give optimizer= alone"):
            PredictionIntervals(model, optimizer=optimiser, **other)
    with pytest.raises(TypeError, match=r"optimizer must be the torch\.optim optimiser"):
        PredictionIntervals(model, optimizer="adam")


def test_a_saved_band_knows_its_damping_without_the_optimiser(tmp_path):
    model = mlp()
    band = PredictionIntervals(model, optimizer=Adam(model.parameters(), weight_decay=0.1)).fit(X, Y, progress=False)
    band.save(tmp_path / "a.band")
    loaded = PredictionIntervals.load(tmp_path / "a.band", model)
    assert loaded.fit(X, Y, progress=False).damping_ == band.damping_
