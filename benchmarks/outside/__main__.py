"""`python -m benchmarks.outside TABLE …`: one command a table."""

from __future__ import annotations

import importlib
import sys

from experiments.errors import Unusable

TABLES = {
    "boston": "ACP-GN's protocol on the Boston data, its published figures beside ours",
    "cqr": "CQR's protocol, on those of its data sets that are at hand",
    "methods": "other scales and the last layer, after the same conformal step, on nine data sets",
    "laplace": "laplace-torch's posteriors, ELLA and VaLLA after the same conformal step",
    "cost": "interval score against cost, a figure",
}


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] not in TABLES:
        lines = [f"  {name:<10} {text}" for name, text in TABLES.items()]
        print("\n".join(["usage: python -m benchmarks.outside TABLE [--help]", "", *lines]))
        sys.exit(0 if arguments in (["--help"], ["-h"]) else 2)
    try:
        importlib.import_module(f"benchmarks.outside.{arguments[0]}").main(arguments[1:])
    except Unusable as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on where it was", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
