"""Networks whose outputs are gradients of their own prediction, as forces are of energies."""

import numpy as np
import pytest
import torch

import tests.reference as reference
from deltaband import Exact, PredictionIntervals
from tests.support.potentials import Potential, structures

DAMPING = 0.05
pytestmark = pytest.mark.filterwarnings("ignore::deltaband.DeltabandWarning")


def energy(out):
    return out["energy"]


def forces(out):
    return out["forces"].flatten(1)


def potential():
    torch.manual_seed(0)
    return Potential().double()


@pytest.mark.parametrize("parameters", ["last", "all"])
@pytest.mark.parametrize("pick", [energy, forces])
def test_bands_of_energies_and_forces_are_those_of_the_dense_formula(pick, parameters):
    model, (R, E, F) = potential(), structures(30)
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), output=pick, parameters=parameters)
    band.fit(R[:24], (E if pick is energy else F)[:24])
    names = ["last.weight"] if parameters == "last" else None
    J = reference.jacobians(model, [(r[None],) for r in R], names, output=pick)
    q, h, p_star = reference.answers(J[:24], DAMPING, J[24:])
    assert band.n_parameters_ == J.shape[2]
    np.testing.assert_allclose(band.variance(R[24:]).reshape(q.shape), q, rtol=1e-7)
    np.testing.assert_allclose(band.leverage(R[24:]).reshape(h.shape), h, rtol=1e-7)
    assert band.effective_parameters_ == pytest.approx(p_star, rel=1e-7)
    with torch.no_grad():
        np.testing.assert_allclose(
            band.predict_mean(R[24:]), pick(model(R[24:])).detach().numpy(), rtol=1e-9, atol=1e-12
        )


def test_the_leverage_of_the_last_layer_is_the_published_rigidity_of_predictions():
    """LLPR: σ²(x) = α² f(x)ᵀ(FᵀF + ς²I)⁻¹ f(x), with last-layer features of the training rows F, and of forces their
    slopes; α² makes the variances of validation rows those of their errors."""
    model, (R, E, _) = potential(), structures(60)
    training, validation, new = R[:40], R[40:50], R[50:]
    features = model.features(training).detach().numpy()
    inverse = np.linalg.inv(features.T @ features + DAMPING * np.eye(features.shape[1]))

    def published(f):  # (b, d)
        return np.einsum("bi,ij,bj->b", f, inverse, f)

    errors = (E[40:50] - model(validation)["energy"]).detach().numpy()
    alpha2 = np.mean(errors**2 / published(model.features(validation).detach().numpy()))
    expected = alpha2 * published(model.features(new).detach().numpy())

    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), output=energy, parameters="last")
    band.fit(training, E[:40])
    ours = np.mean(errors**2 / band.leverage(validation).numpy())
    np.testing.assert_allclose(ours * band.leverage(new).numpy(), expected, rtol=1e-6)

    some = new.clone().requires_grad_()  # forces, by the fit to energies: their features are slopes
    slopes = torch.stack([torch.autograd.grad(f.sum(), some, retain_graph=True)[0] for f in model.features(some).T])
    f = -slopes.movedim(0, -1).reshape(-1, features.shape[1]).numpy()  # (10·12, d)
    both = PredictionIntervals(model, damping=DAMPING, engine=Exact(), output=forces, parameters="last")
    both.fit(training, torch.zeros(40, 12))
    F = reference.jacobians(model, [(r[None],) for r in training], ["last.weight"], output=forces).reshape(-1, 6)
    inverse = np.linalg.inv(F.T @ F + DAMPING * np.eye(6))
    np.testing.assert_allclose(both.leverage(new).numpy().reshape(-1), published(f), rtol=1e-6)
