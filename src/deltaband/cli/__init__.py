"""The command line: `deltaband`, or `python -m deltaband.cli`. Needs the extra `cli`; nothing else imports it."""

from __future__ import annotations

import importlib.util
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

from ..errors import DeltabandWarning

NEEDS = ("typer", "pyarrow")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 refused or failed, 2 wrong options, 130 interrupted. Errors are one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        return _fail(f"no {' and no '.join(missing)}: pip install 'deltaband[cli]'", 1)
    debug = "--debug" in given
    given = [each for each in given if each != "--debug"] or ["--help"]
    from .app import run
    from .errors import Refusal, one_line

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show
            warnings.simplefilter("default", DeltabandWarning)
            warnings.simplefilter("ignore", FutureWarning)  # of torch, to its own developers
            return run(given)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _fail(one_line(error), error.code if isinstance(error, Refusal) else 1)


def _show(
    message: Warning | str, category: type, filename: str, lineno: int, file: TextIO | None = None, line: object = None
) -> None:
    print(f"deltaband: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _fail(message: str, code: int) -> int:
    text = "".join(each if each.isprintable() else "�" for each in message)  # names from files may be anything
    print(f"deltaband: {'error: ' if code != 130 else ''}{text}", file=sys.stderr)
    return code
