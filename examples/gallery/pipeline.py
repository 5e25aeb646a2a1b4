"""
A scikit-learn pipeline
=======================

How much do households spend on food? Engel's data, 235 Belgian households of 1857, are a classic: expenditure grows
with income, and so does its spread. ``IntervalRegressor`` takes a pipeline with scaled inputs and a logarithmic target
as it is.
"""

# %%

import matplotlib.pyplot as plt
import numpy as np
from sklearn.compose import TransformedTargetRegressor
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from statsmodels.datasets import engel

from deltaband.sklearn import IntervalRegressor

table = engel.load_pandas().data
X, y = table[["income"]].to_numpy(), table["foodexp"].to_numpy()
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=60, random_state=0)

network = MLPRegressor(hidden_layer_sizes=(10,), solver="lbfgs", alpha=1.0, max_iter=2000, random_state=0)
estimator = make_pipeline(
    FunctionTransformer(np.log),
    StandardScaler(),
    TransformedTargetRegressor(network, func=np.log, inverse_func=np.exp),
)

# %%
# A third of the training rows is held out for the calibration. Bounds come back in francs. Being an estimator, it can
# be cross-validated; its score is minus the interval score.

regressor = IntervalRegressor(estimator, calibration=0.3, random_state=0).fit(X_train, y_train)
mean, lower, upper = regressor.predict_interval(X_test, level=0.9)
covered = np.mean((lower <= y_test) & (y_test <= upper))
scores = cross_val_score(regressor, X_train, y_train, cv=3)
print(f"{covered:.0%} of {len(y_test)} new households are inside; scores {scores}")

# %%
# The intervals are in proportion to the expenditure, as the network works with its logarithm. Beyond the richest
# households of the training rows they open.

grid = np.geomspace(X_train.min(), X.max(), 200)[:, None]
figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
for level, shade in ((0.9, 0.2), (0.5, 0.35)):
    mean, lower, upper = regressor.predict_interval(grid, level=level)
    ax.fill_between(grid[:, 0], lower, upper, color="tab:blue", alpha=shade, linewidth=0, label=f"{level:.0%}")
ax.plot(grid[:, 0], mean, color="tab:blue")
ax.scatter(X_train[:, 0], y_train, s=10, color="grey", label="training and calibration rows")
ax.scatter(X_test[:, 0], y_test, s=14, color="black", label="new rows")
ax.set(xlabel="income, francs", ylabel="expenditure on food, francs", ylim=(0, 3500))
ax.legend(frameon=False, loc="upper left")
plt.show()
