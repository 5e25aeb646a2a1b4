"""Checkpoints that Lightning writes, and whether networks of Hugging Face were loaded, for the command line."""

import lightning
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deltaband.cli.initialised import RandomNumbers
from deltaband.cli.weights import load_weights

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # their own


def layers(hidden=5):
    return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 1))


class Module(lightning.LightningModule):
    def __init__(self, hidden=5):
        super().__init__()
        self.save_hyperparameters()
        self.model = layers(hidden)

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


@pytest.mark.filterwarnings("ignore")  # of Lightning, on how many processes load data
def test_a_checkpoint_of_lightning_has_the_weights_of_the_network_inside(tmp_path, capsys):
    data = DataLoader(TensorDataset(torch.rand(20, 2), torch.rand(20, 1)), batch_size=5)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    module = Module()
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    found = layers()
    load_weights(found, tmp_path / "last.ckpt")
    assert all(torch.equal(w, module.model.state_dict()[name]) for name, w in found.state_dict().items())
    assert "took its entry 'state_dict', took 'model.' off the names" in capsys.readouterr().err
    with RandomNumbers() as random_numbers:
        loaded = Module.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert list(random_numbers.names(loaded)) == []


def test_a_pretrained_network_is_known_and_so_is_a_head_that_is_new(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(**sizes, vocab_size=50, num_labels=1)
    whole, body = transformers.BertForSequenceClassification, transformers.BertModel
    whole(config).save_pretrained(tmp_path / "whole")
    body(config).save_pretrained(tmp_path / "body")
    found = []
    for make in (
        lambda: whole(config),
        lambda: whole.from_pretrained(tmp_path / "whole"),
        lambda: whole.from_pretrained(tmp_path / "body"),
    ):
        with RandomNumbers() as random_numbers:
            network = make()
        found.append(list(random_numbers.names(network)))
    assert "bert.embeddings.word_embeddings.weight" in found[0]
    assert found[1:] == [[], ["classifier.weight"]]
