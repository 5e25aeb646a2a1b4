"""
Regression on images
====================

By how much has a digit been turned? A convolutional network answers in degrees, and every answer gets an interval of
its own: some digits are easier to read than others.
"""

# %%
# scikit-learn's digits, turned by up to 60 degrees either way. Every digit is either for training, for calibration or
# new.

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from torch import nn

from deltaband import PredictionIntervals, RandomProjection

rng = np.random.default_rng(0)
digits = load_digits()
angles = rng.uniform(-60, 60, len(digits.images))
turned = [rotate(image, angle, reshape=False, order=1) for image, angle in zip(digits.images, angles, strict=True)]
X = torch.tensor(np.stack(turned), dtype=torch.float32)[:, None] / 16
y = torch.tensor(angles / 60, dtype=torch.float32)
train, held_out, new = torch.tensor(rng.permutation(len(y))).split([1000, 300, len(y) - 1300])

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Conv2d(12, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    *(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
for _ in range(40):
    for rows in train[torch.randperm(len(train))].split(100):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X[rows])[:, 0], y[rows]).backward()
        optimizer.step()

# %%
# A random projection of the gradients is enough here, and takes a moment. The noise is learnt from the features of the
# last layer, so the width may differ from digit to digit.

band = PredictionIntervals(model, engine=RandomProjection(300), target_transform=(0.0, 60.0))
band.fit(X[train], y[train], progress=False).calibrate(X[held_out], y[held_out])
intervals = band.predict(X[new], level=0.9)
width = intervals.width.numpy()
kind = digits.target[new.numpy()]
covered = intervals.contains(60 * y[new]).double().mean().item()
mean_width = {digit: width[kind == digit].mean() for digit in range(10)}
print(f"{covered:.0%} covered; mean widths by digit:", {digit: f"{size:.0f}°" for digit, size in mean_width.items()})

# %%
# The narrowest and the widest intervals among the new digits. The widest are those that could be several digits.

order = np.argsort(width)
figure, axes = plt.subplots(2, 6, figsize=(10, 4.2), layout="constrained")
for row, chosen in zip(axes, (order[:6], order[-6:]), strict=True):
    for ax, k in zip(row, chosen, strict=True):
        ax.imshow(X[new[k], 0].numpy(), cmap="gray_r")
        ax.set_title(f"{intervals.mean[k]:.0f}° ± {width[k] / 2:.0f}°\n(is {angles[new[k]]:.0f}°)", fontsize=10)
        ax.set_axis_off()
figure.suptitle("most certain (top) and least certain (bottom)")
plt.show()
