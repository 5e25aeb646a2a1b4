"""The paper's protocol on small data made here."""

import numpy as np
import pytest
import torch

from experiments import data, protocol
from experiments.protocol import Protocol, divide, groups, standardised


def silent(text):
    pass


def test_the_parts_of_a_split_share_no_row_and_have_the_paper_s_sizes(first):
    for i in range(2):
        rest, held, test = first.rest[i], first.held[i], first.test[i]
        assert [len(rest), len(held), len(test)] == [87, 21, 12]
        assert sorted([*rest, *held, *test]) == list(range(120))
        assert sorted(first.training[i]) == sorted([*rest, *held])
    assert set(first.test[0]) != set(first.test[1])


def test_a_data_set_is_split_alike_whatever_splits_are_asked_for(folder):
    X, y = data.load("first", folder)
    alone = Protocol("first", X, y, [1], folder, silent)
    np.testing.assert_array_equal(alone.test[0], Protocol("first", X, y, range(3), folder, silent).test[1])


def test_rows_are_standardised_by_the_first_part_alone():
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(5, 3, 50), np.full(50, 7.0)])
    y = rng.normal(-2, 4, 50)
    order = rng.permutation(50)
    ours, other = standardised(X, y, *divide(order, 0.2))
    assert [len(ours.y), len(other.y)] == [40, 10]
    np.testing.assert_allclose(ours.x.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(ours.x.std(axis=0), [1, 0], atol=1e-6)  # a constant column stays one
    np.testing.assert_allclose([ours.y.mean(), ours.y.std()], [0, 1], atol=1e-6)
    expected = (X[order[40:], 0] - X[order[:40], 0].mean()) / X[order[:40], 0].std()
    np.testing.assert_allclose(other.x[:, 0], expected, rtol=1e-5)


def test_splits_are_trained_in_the_same_groups_however_many_are_asked_for():
    def firsts_and_lasts(n, splits):
        return [(group[0], group[-1]) for group in groups(n, splits)]

    assert firsts_and_lasts(308, 1) == firsts_and_lasts(308, 20) == [(0, 19)]
    assert firsts_and_lasts(13_750, 20) == [(0, 13), (14, 19)]
    assert firsts_and_lasts(13_750, 15) == [(0, 13), (14, 19)]
    assert firsts_and_lasts(13_750, 14) == [(0, 13)]
    assert firsts_and_lasts(13_750, 21) == [(0, 13), (14, 19), (20, 33)]
    assert firsts_and_lasts(21_263, 20) == [(0, 8), (9, 17), (18, 19)]
    assert firsts_and_lasts(241_600, 5) == [(i, i) for i in range(5)]


def weights(networks):
    return [w.detach() for network in networks for w in network.parameters()]


def test_the_network_of_calibrated_intervals_has_seen_nothing_of_the_held_out_rows(folder, first):
    y = first.y.copy()
    y[first.held[0]] += 100 * np.arange(21)
    # one split: rounding depends on which networks are trained together
    mine, other = (Protocol("first", first.X, t, [0], folder / n, silent) for t, n in ((first.y, "a"), (y, "b")))
    assert all(map(torch.equal, weights(mine.without_held()[0].networks), weights(other.without_held()[0].networks)))
    assert not torch.equal(weights(mine.members(1)[0].networks)[0], weights(other.members(1)[0].networks)[0])


def test_members_differ_and_the_first_is_the_network_of_the_other_methods(first):
    members = first.members(5)[1].networks
    assert len(members) == 5
    assert len({round(w[0].sum().item(), 6) for w in (weights([member]) for member in members)}) == 5
    assert torch.equal(weights([members[0]])[0], weights(first.members(1)[1].networks)[0])


def test_networks_are_kept_and_trained_again_only_under_other_conditions(folder, first, monkeypatch):
    before = weights(first.members(1)[0].networks)
    monkeypatch.setattr(protocol, "train", None)  # would fail
    monkeypatch.setattr(protocol, "search", None)
    again = Protocol("first", first.X, first.y, range(2), first.folder, silent)
    assert all(map(torch.equal, weights(again.members(1)[0].networks), before))
    for name in ("PATIENCE", "EPOCHS_AT_LEAST"):
        with monkeypatch.context() as patch:
            patch.setattr(protocol, name, 17)
            with pytest.raises(TypeError):
                Protocol("first", first.X, first.y, range(2), first.folder, silent).members(1)
    with pytest.raises(TypeError):
        Protocol("first", first.X, first.y + 1, range(2), first.folder, silent).members(1)


@pytest.mark.parametrize("damage", [b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}", b"nonsense" * 10])
def test_a_damaged_file_of_networks_is_made_again(first, damage):
    before = weights(first.members(1)[0].networks)
    files = sorted(first.folder.iterdir())
    assert [path.suffix for path in files] == [".safetensors"] * 2
    for path in files:
        path.write_bytes(damage)
    again = Protocol("first", first.X, first.y, range(2), first.folder, silent)
    assert all(map(torch.equal, weights(again.members(1)[0].networks), before))
