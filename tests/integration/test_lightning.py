"""Lightning modules, as a trainer leaves them."""

import copy

import lightning
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tests.reference as reference
from deltaband import Exact, PredictionIntervals

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),  # lightning's own
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]
WEIGHT_DECAY = 1e-2
TRAINER = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Regressor(lightning.LightningModule):
    def __init__(self, X, y):
        super().__init__()
        layers = [nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(6, 1)]
        self.net, self.data = nn.Sequential(*layers), TensorDataset(X, y)

    def forward(self, x):
        return self.net(x)[:, 0]

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("validation", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=16)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, weight_decay=WEIGHT_DECAY)


@pytest.fixture(scope="module")
def trained():
    lightning.seed_everything(0, verbose=False)
    X = torch.randn(150, 3)
    model = Regressor(X, X.sum(dim=1).sin() + 0.1 * torch.randn(150))
    trainer = lightning.Trainer(max_epochs=3, num_sanity_val_steps=0, **TRAINER)
    trainer.fit(model)
    return model, trainer


@pytest.mark.parametrize("source", ["the trainer's loader", "the module's loader", "arrays"])
def test_a_module_has_the_intervals_of_plain_gradients(trained, source):
    model, trainer = trained
    X, y = model.data.tensors
    data = {
        "the trainer's loader": lambda: (trainer.train_dataloader,),
        "the module's loader": lambda: (model.train_dataloader(),),
        "arrays": lambda: (X.numpy(), y.numpy()),
    }[source]()
    training, state = model.training, copy.deepcopy(model.state_dict())
    band = PredictionIntervals(model, weight_decay=WEIGHT_DECAY, engine=Exact()).fit(*data, progress=False)
    new = torch.randn(5, 3)
    q, h = band.variance(new), band.leverage(new)
    assert model.trainer is trainer
    assert model.training is training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    evaluated = copy.deepcopy(model).eval()
    J, g = (reference.jacobians(evaluated, [(row[None],) for row in x]) for x in (X, new))
    q_, h_, p_star = reference.answers(J, len(X) * WEIGHT_DECAY / 2, g)
    np.testing.assert_allclose(q, q_[:, 0], rtol=1e-4)
    np.testing.assert_allclose(h, h_[:, 0], rtol=1e-4)
    assert band.effective_parameters_ == pytest.approx(p_star, rel=1e-4)
    torch.testing.assert_close(band.predict(new).mean, evaluated(new).detach())


def test_a_copy_and_a_module_in_the_middle_of_its_training_work_too(trained):
    model, _ = trained
    X, y = model.data.tensors
    q = PredictionIntervals(model, damping=1.0).fit(X, y, progress=False).variance(X[:5])
    copied = PredictionIntervals(copy.deepcopy(model), damping=1.0).fit(X, y, progress=False)
    torch.testing.assert_close(copied.variance(X[:5]), q)
    seen = []

    class Intervals(lightning.Callback):
        def on_validation_epoch_end(self, trainer, module):
            band = PredictionIntervals(module, damping=1.0).fit(X, y, progress=False)
            seen.append((band.variance(X[:5]), module.training))

    again = Regressor(X, y)
    lightning.Trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[Intervals()], **TRAINER).fit(again)
    assert len(seen) == 2
    assert not any(training for _, training in seen)  # as lightning validates, and as it was left
    torch.testing.assert_close(PredictionIntervals(again, damping=1.0).fit(X, y).variance(X[:5]), seen[-1][0])
