"""Words for data that are not what the network was trained on: how it shows, and what the likely cause is.

What is judged, and by which limits, is in `Moments` and `Ranges`; docs/gotchas.md says how far the limits are from what
networks show on rows like those they were trained on.
"""

import numpy as np

from ..data.row_record import Moments
from ..errors import InputsMessage, MisfitMessage

CAUSES = (
    "are its weights loaded, and the inputs scaled as in training (input_transform=), and the targets in the units of "
    "training (target_transform=, targets=)?"
)


def misfit(moments: Moments, bad: np.ndarray, rows: str) -> str:
    """Return what to say of outputs that say too little about the targets of these rows."""
    worst = int(np.flatnonzero(bad)[moments.explained[bad].argmin()])
    which = "" if len(bad) == 1 else f" (output {worst} of {len(bad)})"
    r2, correlated = moments.explained[worst], moments.correlated[worst]
    found = f"the network predicts {rows} worse than their mean would, R² = {r2:.3g}{which}"
    if r2 >= 0:
        found = f"the network explains only {r2:.1%} of the variance of the targets of {rows}{which}"
    slope, shift = (float(each[worst]) for each in moments.line)
    if slope > 0 and correlated > 0.5 and correlated > 2 * r2:
        return MisfitMessage(
            f"{found}, while {slope:.4g} · prediction {shift:+.4g} would explain {correlated:.1%}: targets or inputs "
            "seem to be in other units than in training. Scale them as in training; or, if the targets' mean and std "
            f"are {shift:.4g} and {slope:.4g}, give these as target_transform="
        )
    return MisfitMessage(f"{found}: {CAUSES}")


def unrelated(trained: float, found: float, rows: str) -> str:
    """Return what to say of rows whose targets have nothing to do with their predictions; both numbers are R²."""
    return MisfitMessage(
        f"the network explains {trained:.0%} of the variance of the targets of its training rows, and of {rows} "
        f"nothing (R² = {found:.3g}; predictions and targets are hardly correlated): are targets in the order of their "
        "rows, and columns in that of training? Or has it learnt its training rows by heart, and nothing else?"
    )


def far_off(median: np.ndarray, rows: str) -> str:
    """Return what to say of rows whose errors are mostly larger than the training targets vary."""
    return MisfitMessage(
        f"half of {rows} are more than {median.max():.3g} standard deviations of the training targets from their "
        "predictions: are inputs and targets scaled as those of fit were?"
    )


def inputs(share: float, feature: str, rows: str) -> str:
    """Return what to say of rows that lie outside of the training rows, or were inside before a transform."""
    if share == 0:
        return InputsMessage(
            f"{rows} look as if they had been scaled already: with input_transform every method takes raw inputs; give "
            "these, or leave input_transform out"
        )
    return InputsMessage(
        f"{share:.0%} of {rows} lie far outside of the training rows ({feature}): are the inputs scaled as those "
        "of fit were (input_transform=)? Predictions and intervals mean little there"
    )


def other_units(targets: str, call: str) -> str:
    """Return what to say of targets that fit the network in the other units; `targets` is what was expected."""
    if targets == "scaled":
        return (
            f"the targets of {call} are in the original units, where the network was trained on scaled ones: give "
            f"PredictionIntervals(..., targets='original'), or give {call} the scaled targets"
        )
    why = "answers are in the original units" if call == "these rows" else "targets='original' was given"
    advice = "" if call == "these rows" else "leave that out, or "
    return (
        f"the targets of {call} have been scaled already, and {why}: {advice}give the targets in their original units"
    )


def no_better_than_frequencies(loss: float, entropy: float) -> str:
    """Return what to say of a classifier that knows less about its training rows than how frequent classes are."""
    return MisfitMessage(
        f"the cross-entropy of the training rows, {loss:.4g}, is above that of their class frequencies, {entropy:.4g}: "
        "are the weights loaded, the inputs scaled as in training (input_transform=), and the labels numbered as in "
        "training? (Of a training with class weights, give them as sample_weight=.)"
    )
