"""`python -m experiments COMMAND …`: the paper's evaluation, the study of its score, and calibration on real data."""

from __future__ import annotations

import importlib
import sys

from .errors import Unusable

COMMANDS = {
    "reproduce": "Table 1 and Table 2 of the paper: every method on every split",
    "figure": "Figure 1 of the paper: spectra for red wine, rank 200",
    "score": "which directions a sketch should keep, at ranks 50 to 1000",
    "energy": "the paper's energy data: what a target coded as classes does to the widths",
    "continued": "networks trained as in the authors' code, not from scratch: what difference it makes",
    "parameters": "a higher rank or more parameters, on two data sets",
    "calibration": "calibrated intervals against the formula and MAPIE",
    "noise": "learnt noise against mean-variance and quantile networks",
    "world": "promises to groups, under shift and in time, against MAPIE's, crepes' and constant width",
    "misuse": "what is said of data that are not what a network was trained on",
    "digits": "which inputs not to trust: widths of a classifier's intervals against its entropy",
    "labelsets": "sets of labels against MAPIE's, and with probabilities softened by the variance of log-odds",
    "logodds": "the standard deviation of a classifier's log-odds: simulated, and as its intervals say",
    "optimise": "Bayesian optimisation with a network's posterior against a Gaussian process",
    "fields": "images and horizons as outputs: coverage by pixel of a U-Net, by horizon of an LSTM",
    "report": "Markdown and pictures from the results of all of them",
}


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] not in COMMANDS:
        lines = [f"  {name:<12} {text}" for name, text in COMMANDS.items()]
        print("\n".join(["usage: python -m experiments COMMAND [--help]", "", *lines]))
        sys.exit(0 if arguments in (["--help"], ["-h"]) else 2)
    try:
        importlib.import_module(f"experiments.{arguments[0]}").main(arguments[1:])
    except Unusable as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on where it was", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
