"""Small classifiers, labels for them, and intervals fitted to both."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from deltaband import ClassificationIntervals


def classifier(n_outputs, dtype=torch.float64, hidden=6, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, n_outputs)).to(dtype)


def labelled(n=60, n_classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return X, torch.randint(0, n_classes, (n,), generator=generator)


def fitted(model, data, **settings):
    return ClassificationIntervals(model, **({"damping": 0.7} | settings)).fit(*data, progress=False)


def trained(X, y, n_outputs, weight_decay, start):
    """To the minimum of the mean cross-entropy + wd/2·‖w‖²."""
    model = classifier(n_outputs, hidden=2)
    model.load_state_dict(start)
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        value = cross_entropy(model(X), y) + weight_decay / 2 * sum(w.square().sum() for w in model.parameters())
        value.backward()
        return value

    optimiser.step(loss)
    return model
