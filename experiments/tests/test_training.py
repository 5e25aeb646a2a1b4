"""Training many networks at once is training each of them alone."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from experiments import training
from experiments.training import Recipe, Rows, Stack, search, train

RECIPE = Recipe(batch=16, rate=1e-2, weight_decay=1e-2)
SEEDS = (3, 4, 5)
OWNER = (0, 1, 1)


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 40, 3, generator=generator)  # the last batch of an epoch is smaller
    return Rows(x, x.sum(dim=2).sin() + 0.3 * torch.randn(2, 40, generator=generator))


def silent(text):
    pass


def one_by_one(network, x, y, seed, epochs, recipe=RECIPE, loss=None, optimiser_class=torch.optim.Adam):
    """An ordinary training loop. Yields the network after each epoch."""
    network = copy.deepcopy(network)
    loss = loss or (lambda outputs, y: nn.functional.mse_loss(outputs[:, 0], y))
    optimiser = optimiser_class(network.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(recipe.batch):
            optimiser.zero_grad()
            loss(network(x[batch]), y[batch]).backward()
            optimiser.step()
        yield network


def test_a_stack_gives_what_its_networks_give(rows):
    stack = Stack.initial(3, SEEDS)
    outputs = stack(rows.x[list(OWNER)])
    for i, owner in enumerate(OWNER):
        torch.testing.assert_close(outputs[i], stack.network(i)(rows.x[owner])[:, 0])


def test_networks_start_as_torch_would_start_them():
    stack = Stack.initial(3, SEEDS)
    torch.manual_seed(SEEDS[1])
    layers = [nn.Linear(3, 50), nn.Linear(50, 50), nn.Linear(50, 1)]
    for mine, theirs in zip(stack.network(1)[::2], layers, strict=True):
        assert torch.equal(mine.weight, theirs.weight)
        assert torch.equal(mine.bias, theirs.bias)


@pytest.mark.parametrize("at_once", [training.ROWS_AT_ONCE, 1, 32], ids=["together", "one by one", "in pairs"])
def test_training_together_equals_training_alone(rows, at_once, monkeypatch):
    monkeypatch.setattr(training, "ROWS_AT_ONCE", at_once)
    epochs = (7, 2, 5)  # they leave the stack in another order than they stand in
    start = Stack.initial(3, SEEDS)
    trained = train(start, rows, OWNER, SEEDS, epochs, RECIPE, silent)
    for i, owner in enumerate(OWNER):
        *_, alone = one_by_one(start.network(i), rows.x[owner], rows.y[owner], SEEDS[i], epochs[i])
        together = trained.network(i)
        for a, b in zip(together.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(together[0].weight, start.network(i)[0].weight, atol=1e-3)


def test_early_stopping_equals_an_ordinary_loop(rows):
    held = Rows(rows.x[:, 30:], rows.y[:, 30:])
    learnt = Rows(rows.x[:, :30], rows.y[:, :30])
    start = Stack.initial(3, SEEDS)
    stopped, epochs, errors = search(start, learnt, held, OWNER, SEEDS, RECIPE, 4, silent)
    for i, owner in enumerate(OWNER):
        best, waited = np.inf, 0
        course = one_by_one(start.network(i), learnt.x[owner], learnt.y[owner], SEEDS[i], 500)
        seen = []
        for network in course:
            error = nn.functional.mse_loss(network(held.x[owner])[:, 0], held.y[owner]).item()
            seen.append(error)
            best, waited = (error, 0) if error < best else (best, waited + 1)
            if waited == 4:
                break
        assert epochs[i] == len(seen)
        assert errors[i] == pytest.approx(error, rel=1e-3)
        for a, b in zip(stopped.network(i).parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimiser", [torch.optim.Adam, torch.optim.AdamW])
def test_networks_at_their_best_under_another_loss_and_optimiser_equal_an_ordinary_loop(rows, optimiser):
    held = Rows(rows.x[:, 30:], rows.y[:, 30:])
    learnt = Rows(rows.x[:, :30], rows.y[:, :30])

    def loss(outputs, y):  # of two outputs, (m, b, 2) and (b, 2)
        return (outputs[..., 0] - y).abs() + (outputs[..., 1] - 2 * y) ** 2

    start = Stack.initial(3, SEEDS, outputs=2)
    recipe = RECIPE._replace(weight_decay=0.5)  # which tells the optimisers apart
    stopped, epochs, errors = search(
        start,
        learnt,
        held,
        OWNER,
        SEEDS,
        recipe,
        4,
        silent,
        loss=loss,
        decoupled=optimiser is torch.optim.AdamW,
        epochs_at_most=12,
        best_of_all=True,
    )
    for i, owner in enumerate(OWNER):
        course = one_by_one(
            start.network(i),
            learnt.x[owner],
            learnt.y[owner],
            SEEDS[i],
            epochs[i],
            recipe,
            lambda outputs, y: loss(outputs, y).mean(),
            optimiser,
        )
        seen = []
        for network in course:
            with torch.no_grad():
                error = loss(network(held.x[owner]), held.y[owner]).mean().item()
            seen.append((error, [w.detach().clone() for w in network.parameters()]))
        error, best = min(seen, key=lambda each: each[0])
        assert errors[i] == pytest.approx(error, rel=1e-3)
        for a, b in zip(stopped.network(i).parameters(), best, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert max(epochs) <= 12


def test_early_stopping_ends_where_training_never_stops_improving(rows, monkeypatch):
    monkeypatch.setattr(training, "EPOCHS_AT_MOST", 3)
    _, epochs, _ = search(Stack.initial(3, SEEDS), rows, rows, OWNER, SEEDS, RECIPE, 100, silent)
    assert epochs == [3, 3, 3]


def test_training_is_the_same_from_run_to_run_with_dropout_too(rows):
    torch.manual_seed(1)
    first = train(Stack.initial(3, SEEDS, [0.0, 0.1, 0.5]), rows, OWNER, SEEDS, [3] * 3, RECIPE, silent)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = train(Stack.initial(3, SEEDS, [0.0, 0.1, 0.5]), rows, OWNER, SEEDS, [3] * 3, RECIPE, silent)
    for a, b in zip(first.parameters, second.parameters, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), state)


def test_training_leaves_the_arithmetic_as_it_was(rows):
    train(Stack.initial(3, SEEDS), rows, OWNER, SEEDS, [1] * 3, RECIPE, silent)
    assert np.nextafter(0.0, 1.0) * 1.0 > 0
    assert torch.tensor(1e-310, dtype=torch.float64) * 0.5 > 0


def test_dropout_of_rate_zero_changes_nothing_and_a_higher_one_does(rows):
    plain = train(Stack.initial(3, SEEDS), rows, OWNER, SEEDS, [3] * 3, RECIPE, silent)
    dropped = train(Stack.initial(3, SEEDS, [0.0, 0.0, 0.5]), rows, OWNER, SEEDS, [3] * 3, RECIPE, silent)
    torch.testing.assert_close(dropped.weights[0][:2], plain.weights[0][:2])
    assert not torch.allclose(dropped.weights[0][2], plain.weights[0][2])
    assert not any(isinstance(module, nn.Dropout) for module in dropped.network(0))
    assert [module.p for module in dropped.network(2) if isinstance(module, nn.Dropout)] == [0.5, 0.5]


def test_dropout_keeps_the_mean_and_drops_its_share():
    stack = Stack.initial(3, (0, 1), [0.3, 0.3])
    # a network that adds up its second hidden layer, which is all ones
    stack.weights[1].zero_()
    stack.biases[1].fill_(1.0)
    stack.weights[2].fill_(1.0)
    stack.biases[2].zero_()
    torch.manual_seed(0)
    outputs = stack(torch.zeros(2, 20_000, 3), training=True).double()
    torch.testing.assert_close(outputs.mean(), torch.tensor(50.0).double(), rtol=0, atol=0.1)
    torch.testing.assert_close(outputs.var(), torch.tensor(50 * 0.3 / 0.7).double(), rtol=0.03, atol=0)
