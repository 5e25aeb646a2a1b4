"""
A transformer on sequences of any length
========================================

Words go in, a score comes out. The sequences seen in training have at most twelve words; how sure is the network of
longer ones?
"""

# %%
# Every word has a value, which the next word turns around if it is the word 1, "not". Sequences are padded with
# zeros.

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from deltaband import PredictionIntervals, RandomProjection

LONGEST = 30
rng = np.random.default_rng(0)
values = rng.normal(size=20)
values[:2] = 0


def sentences(n, shortest, longest):
    lengths = rng.integers(shortest, longest + 1, n)
    words = rng.integers(1, 20, (n, LONGEST)) * (np.arange(LONGEST) < lengths[:, None])
    sign = np.where(np.roll(words, -1, axis=1) == 1, -1, 1)
    score = (values[words] * sign).sum(axis=1) / np.sqrt(lengths) + 0.1 * rng.normal(size=n)
    return torch.tensor(words), torch.tensor(score, dtype=torch.float32), lengths


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16, padding_idx=0), nn.Embedding(LONGEST, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 1)

    def forward(self, ids):
        present = ids > 0
        h = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        h = self.encoder(h, src_key_padding_mask=~present) * present[:, :, None]
        return self.head(h.sum(dim=1) / present.sum(dim=1, keepdim=True).sqrt())


X, y, _ = sentences(1500, 3, 12)
torch.manual_seed(0)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(8):
    for rows in torch.randperm(1000).split(50):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X[rows])[:, 0], y[rows]).backward()
        optimizer.step()

# %%
# Attention needs no special treatment.

band = PredictionIntervals(model, engine=RandomProjection(300))
band.fit(X[:1000], y[:1000], progress=False).calibrate(X[1000:], y[1000:])
X_new, y_new, lengths = sentences(800, 3, LONGEST)
intervals = band.predict(X_new, level=0.9)
leverage = band.leverage(X_new).numpy()

# %%
# Beyond twelve words the network meets places that it has never been trained on. The intervals widen a little, far too
# little: no calibration can promise coverage where it had no rows. But the leverage of such sentences is several times
# what it was in training, without any target. It tells which answers not to use.

inside = intervals.contains(y_new).numpy()
width = intervals.width.numpy()
bins = [(3, 5), (6, 8), (9, 12), (13, 16), (17, 22), (23, 30)]
rows = [(lengths >= low) & (lengths <= high) for low, high in bins]
names = [f"{low}–{high}" for low, high in bins]
coverage, typical, unusual = (
    [part[chosen].mean() for chosen in rows] for part in (inside, width, leverage / np.median(leverage[lengths <= 12]))
)
figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
for ax, heights, title in zip(
    axes, (typical, unusual, coverage), ("mean width", "leverage", "share covered, 90 % asked"), strict=True
):
    ax.bar(names, heights, color=["tab:blue"] * 3 + ["tab:orange"] * 3)
    ax.set(title=title, xlabel="words (orange: never seen)")
    ax.tick_params(axis="x", labelsize=8)
axes[1].set_ylabel("relative to sentences as in training")
axes[2].axhline(0.9, color="grey", linestyle=":")
plt.show()
