"""scikit-learn's network in torch: the same function, and the λ of the objective that it was trained to."""

import numpy as np
import pytest
import torch
from sklearn.neural_network import MLPRegressor

from deltaband.sklearn.unwrap import mlp_damping, mlp_to_torch


def data(n=150):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (n, 2))
    return X, 3 + np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.1 * rng.standard_normal(n)


def network(**settings):
    settings = {"hidden_layer_sizes": (6,), "activation": "tanh", "solver": "lbfgs", "max_iter": 3000, **settings}
    return MLPRegressor(random_state=0, **settings)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("solver", ["lbfgs", "sgd", "adam"])
@pytest.mark.parametrize("activation", ["identity", "logistic", "tanh", "relu"])
def test_a_converted_network_predicts_what_the_original_does(activation, solver, outputs):
    X, y = data()
    y = np.column_stack([y, -y, y**2])[:, :outputs]
    estimator = MLPRegressor(hidden_layer_sizes=(7, 5), activation=activation, solver=solver, max_iter=20)
    estimator.fit(X, y if outputs > 1 else y[:, 0])
    converted = mlp_to_torch(estimator)(torch.from_numpy(X)).detach().numpy()
    assert converted.shape == (len(X), outputs)
    np.testing.assert_allclose(converted, estimator.predict(X).reshape(len(X), outputs), rtol=0, atol=1e-12)


def test_a_network_without_hidden_layers_and_one_with_a_poisson_loss_are_converted():
    X, y = data()
    for settings in ({"hidden_layer_sizes": ()}, {"loss": "poisson"}):
        estimator = network(**settings).fit(X, y)
        converted = mlp_to_torch(estimator)(torch.from_numpy(X)).detach().numpy()[:, 0]
        np.testing.assert_allclose(converted, estimator.predict(X), rtol=1e-12)


def test_a_conversion_leaves_the_random_numbers_of_torch_alone():
    estimator = network().fit(*data())
    state = torch.get_rng_state()
    mlp_to_torch(estimator)
    assert torch.equal(torch.get_rng_state(), state)


def gradient(estimator, X, y, damping):
    """Of SSE + λ‖W‖², the biases not penalised, and of SSE alone."""
    module = mlp_to_torch(estimator)
    sse = (torch.from_numpy(y).reshape(len(y), -1) - module(torch.from_numpy(X))).square().sum()
    penalty = sum(w.square().sum() for name, w in module.named_parameters() if name.endswith("weight"))
    gradients = [torch.autograd.grad(f, module.parameters(), retain_graph=True) for f in (sse + damping * penalty, sse)]
    return [float(torch.cat([g.reshape(-1) for g in gs]).norm()) for gs in gradients]


LONG = {"learning_rate_init": 0.01, "max_iter": 2000, "n_iter_no_change": 2000, "tol": 0}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {"tol": 1e-12},
        {"tol": 1e-12, "activation": "logistic", "hidden_layer_sizes": (5, 4)},
        {"solver": "adam", "hidden_layer_sizes": (), **LONG},  # all rows are one batch
        {"solver": "adam", "hidden_layer_sizes": (), "outputs": 3, **LONG},
    ],
)
def test_lambda_is_that_of_the_objective_whose_gradient_vanishes_where_the_training_ends(settings):
    X, y = data(60)
    settings = dict(settings)
    y = np.column_stack([y, np.cos(y), X[:, 0]]) if settings.pop("outputs", 1) == 3 else y
    estimator = network(alpha=0.3, **settings).fit(X, y)
    damping = mlp_damping(estimator, len(X))
    assert damping == pytest.approx(0.3)
    whole, without_penalty = gradient(estimator, X, y, damping)
    assert whole < 0.01 * without_penalty
    for factor in (0.5, 2):
        assert gradient(estimator, X, y, factor * damping)[0] > 0.3 * without_penalty


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(("n", "batch_size"), [(40, 10), (40, 20), (30, 20), (50, 20)])
def test_lambda_of_small_batches_is_what_the_weights_of_a_linear_network_show(n, batch_size):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, 1))
    y = 2 * X[:, 0] + 0.1 * rng.standard_normal(n)
    estimator = MLPRegressor(hidden_layer_sizes=(), solver="sgd", alpha=5.0, batch_size=batch_size, momentum=0)
    estimator.set_params(learning_rate_init=0.003, max_iter=1000, n_iter_no_change=1000, tol=0, random_state=0)
    estimator.fit(X, y)
    w = estimator.coefs_[0][0, 0]
    shown = X[:, 0] @ (y - estimator.predict(X)) / w  # the gradient of SSE is −2λw at the optimum
    assert mlp_damping(estimator, n) == pytest.approx(shown, rel=0.03)


def test_lambda_follows_from_alpha_solver_and_batch_size():
    def damping(n, **settings):
        return mlp_damping(MLPRegressor(alpha=0.2, **settings), n)

    assert damping(1000, solver="lbfgs") == 0.2
    assert damping(1000) == damping(1000, solver="sgd") == pytest.approx(0.2 * 5)  # "auto" is 200
    assert damping(150) == damping(150, batch_size=500) == pytest.approx(0.2)
    assert damping(1000, batch_size=50) == pytest.approx(0.2 * 20)
    assert damping(300) == pytest.approx(0.2 * 300 * (1 / 200 + 1 / 100) / 2)  # a last batch that is smaller
    assert damping(1000, batch_size=100, early_stopping=True) == pytest.approx(0.2 * 9)
    assert damping(1000, batch_size=100, early_stopping=True, validation_fraction=0.5) == pytest.approx(0.2 * 5)
    assert damping(1000, early_stopping=True, solver="lbfgs") == 0.2  # which does not stop early
    assert mlp_damping(MLPRegressor(alpha=0), 100) is None
    assert damping(1000, loss="poisson") is None


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_lbfgs_with_several_outputs_has_no_lambda():
    X, y = data(60)
    Y = np.column_stack([y, np.cos(y), X[:, 0]])
    estimator = network(alpha=0.3, tol=1e-12).fit(X, Y)
    assert mlp_damping(estimator, 60) is None
    for damping in (0.3, 0.9):  # of the sum of the losses, and of their mean
        assert gradient(estimator, X, Y, damping)[0] > 0.05 * gradient(estimator, X, Y, damping)[1]
