"""Weights in files as people have them, and networks whose weights nobody has trained."""

import argparse
import copy
import io

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from deltaband.cli.initialised import RandomNumbers
from deltaband.cli.output import Refusal
from deltaband.cli.weights import load_weights


def network(m=1):
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, m))


STATE = {name: torch.randn_like(w) for name, w in network().state_dict().items()}


def named(prefix, state=STATE):
    return {prefix + name: w for name, w in state.items()}


# --- files


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (STATE, ""),
        ({"state_dict": STATE, "epoch": 3}, "took its entry 'state_dict'"),
        ({"model_state_dict": STATE, "optimizer_state_dict": {"state": {}, "param_groups": []}, "loss": 0.1}, "entry"),
        ({"epoch": 3, "generator": STATE}, "took its entry 'generator'"),
        ({"state_dict": STATE, "state_dict_ema": named("", network().state_dict())}, "took its entry 'state_dict'"),
        (named("module."), "took 'module.' off the names"),
        (named("_orig_mod."), "took '_orig_mod.' off the names"),
        (named("module._orig_mod."), "took 'module.' and '_orig_mod.' off the names"),
        ({**named("module."), "n_averaged": torch.tensor(3)}, "took 'module.' off the names, left out n_averaged"),
        (named("backbone."), "took 'backbone.' off the names"),
        (
            {**named("model."), **named("ema_model.", network().state_dict())},
            "took 'model.' off the names, left out ema",
        ),
        (
            {"state_dict": {**named("model."), "loss.weight": torch.ones(3)}, "hyper_parameters": {"lr": 0.1}},
            "took its entry 'state_dict', took 'model.' off the names, left out loss.weight",
        ),
        ({name.replace("3.", "_orig_mod.3.") if name[0] == "3" else name: w for name, w in STATE.items()}, "_orig_mod"),
    ],
    ids=range(13),
)
def test_checkpoints_are_unwrapped_and_that_is_said(content, said, tmp_path, capsys):
    torch.save(content, tmp_path / "w.ckpt")
    made = network()
    load_weights(made, tmp_path / "w.ckpt")
    for name, w in made.state_dict().items():
        assert torch.equal(w, STATE[name])
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == (1 if said else 0)


def test_a_checkpoint_of_lightning_is_read(tmp_path, capsys):
    """What Lightning 2 writes, apart from the numbers in it."""
    model = network()
    optimiser = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimiser.step()
    checkpoint = {
        "epoch": 9,
        "global_step": 90,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": named("model."),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 10}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.1), "best_k_models": {}}},
        "optimizer_states": [optimiser.state_dict()],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.01, "hidden": [4]},
    }
    torch.save(checkpoint, tmp_path / "last.ckpt")
    load_weights(model, tmp_path / "last.ckpt")
    assert torch.equal(model[0].weight, STATE["0.weight"])
    assert "took its entry 'state_dict', took 'model.' off the names\n" in capsys.readouterr().err


def test_safetensors_and_compiled_networks_are_unwrapped_too(tmp_path, capsys):
    safetensors.torch.save_file(named("module."), tmp_path / "w.safetensors")
    made = network()
    load_weights(torch.compile(made, backend="eager"), tmp_path / "w.safetensors")
    assert torch.equal(made[0].weight, STATE["0.weight"])
    assert "took 'module.' off the names" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            named("student.") | named("teacher."),
            r"the network's weights under student\., teacher\.: save those that",
        ),
        ({"a": STATE, "b": STATE}, "holds several state dicts, a, b: save the one that is meant alone"),
        ({"epoch": 3}, "its entry 'epoch' is not a tensor"),
        ([STATE], "it holds list; save model.state_dict"),
        (named("", network(2).state_dict()), r"'3.weight' is \(1, 4\)|'3.weight' is \(2, 4\)"),
        (named("model.", network(2).state_dict()), r"'3.weight' is \(2, 4\) in .*w.pt and \(1, 4\) in the network"),
        (
            named("model.") | {"model.4.weight": torch.ones(3)},
            r"'4.weight' is \(3,\) in .*w.pt and missing in the network",
        ),
        ({name: STATE[name] for name in list(STATE)[:4]}, "'3.weight' is missing in"),
        (
            {"state_dict": STATE, "hyper_parameters": argparse.Namespace(lr=1)},
            r"w.pt does not hold tensors alone but argparse.Namespace, and loading that could run code: in Python, if "
            r"you trust it, save torch.load\('w.pt', weights_only=False\)\['state_dict'\] alone, or .state_dict\(\)",
        ),
        (network(), "does not hold tensors alone but torch.nn.modules"),
    ],
    ids=range(10),
)
def test_what_does_not_fit_or_is_not_safe_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "w.pt")
    made = network()
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(Refusal, match=message):
        load_weights(made, tmp_path / "w.pt")
    assert all(torch.equal(w, before[name]) for name, w in made.state_dict().items())


@pytest.mark.parametrize("content", [b"", b"junk", b"<html>", b"PK\x03\x04"])
def test_files_of_other_kinds_are_refused_in_one_line(content, tmp_path):
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(Refusal, match=r"w\.pt could not be read as a state dict") as error:
        load_weights(network(), tmp_path / "w.pt")
    assert "\n" not in str(error.value)


# --- weights of the initialisation


class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(0.1 * torch.randn(3, 1))


def seeded():
    torch.manual_seed(3)
    return network()


def custom_initialisation():
    made = network()
    for name, w in made.named_parameters():
        nn.init.zeros_(w) if w.ndim == 1 else nn.init.orthogonal_(w) if name[0] == "0" else nn.init.trunc_normal_(w)
    return made


def without_head():
    made = network()
    made.load_state_dict({name: w for name, w in STATE.items() if name[0] != "3"}, strict=False)
    return made


def with_other_tensors():
    made = network()
    made.register_buffer("neighbours", torch.rand(3, 3).to_sparse())
    with FakeTensorMode():
        network()(torch.rand(2, 3))  # sizes alone, to plan something
    torch.func.vmap(made)(torch.rand(2, 3))
    return made


UNTRAINED = {
    "as made": network,
    "seeded": seeded,
    "in another way": custom_initialisation,
    "in another precision": lambda: network().double(),
    "copied": lambda: copy.deepcopy(network()),
    "a head that was forgotten": without_head,
    "a parameter of its own": Drawn,
    "LSTM": lambda: nn.LSTM(3, 4),
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2),
    "embedding": lambda: nn.Embedding(5, 3, padding_idx=0),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    "compiled": lambda: torch.compile(network(), backend="eager"),
    "beside other tensors": with_other_tensors,
}


@pytest.mark.parametrize("name", UNTRAINED)
def test_weights_of_the_initialisation_are_known(name):
    with RandomNumbers() as random_numbers:
        made = UNTRAINED[name]()
    found = list(random_numbers.names(made))
    assert found
    if name == "a head that was forgotten":
        assert found == ["3.weight", "3.bias"]


def loaded(**options):
    made = network()
    made.load_state_dict(STATE, **options)
    return made


def from_file():
    file = io.BytesIO()
    torch.save(STATE, file)
    file.seek(0)
    made = network()
    made.load_state_dict(torch.load(file, weights_only=True))
    return made


def unpickled():
    file = io.BytesIO()
    torch.save(loaded(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def written(write):
    made = network()
    with torch.no_grad():
        for name, w in made.named_parameters():
            write(w, STATE[name].numpy().copy())
    return made


def row_by_row(w, values):
    for i in range(len(w)):
        w[i] = torch.from_numpy(values)[i]


def trained(optimiser):
    made, x = network(), torch.rand(20, 3)
    stepping = optimiser(made.parameters(), lr=0.01)
    for _ in range(2):
        stepping.zero_grad()
        (made(x) - 1).square().mean().backward()
        stepping.step()
    return made


def assigned():
    with torch.device("meta"):
        made = network()
    made.load_state_dict(STATE, assign=True)
    return made


def random_features():
    made = network()
    made[0].requires_grad_(False)
    made.load_state_dict({name: w for name, w in STATE.items() if name[0] != "0"}, strict=False)
    return made


TRAINED = {
    "loaded": loaded,
    "loaded from a file": from_file,
    "assigned": assigned,
    "a whole module": unpickled,
    "compiled": lambda: torch.compile(loaded(), backend="eager"),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(loaded()),
    "copied by hand": lambda: written(lambda w, values: w.copy_(torch.from_numpy(values))),
    "from lists": lambda: written(lambda w, values: setattr(w, "data", torch.tensor(values.tolist()))),
    "row by row": lambda: written(row_by_row),
    "by NumPy": lambda: written(lambda w, values: np.copyto(w.numpy(), values)),
    "trained there": lambda: trained(torch.optim.SGD),
    "trained there with Adam": lambda: trained(torch.optim.Adam),
    "on features that stay random": random_features,
}


@pytest.mark.parametrize("name", TRAINED)
def test_no_weights_from_elsewhere_are_taken_for_those_of_the_initialisation(name):
    with RandomNumbers() as random_numbers:
        made = TRAINED[name]()
    assert list(random_numbers.names(made)) == []


def test_watching_changes_no_random_number():
    torch.manual_seed(0)
    expected = network().state_dict()
    torch.manual_seed(0)
    with RandomNumbers():
        found = network().state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
