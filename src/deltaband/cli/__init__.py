"""The command line: `deltaband`, or `python -m deltaband.cli`. It needs the extra `cli`; no other module imports it."""

import importlib.util
import sys
import traceback
from collections.abc import Sequence

from .output import Refusal, one_line, strip_control_characters


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and report errors in one line on stderr.

    Args:
        arguments: The words after `deltaband`; those of the process by default.

    Returns:
        The exit code: 0 done, 1 refused or failed, 2 wrong options, 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if missing := [name for name in ("typer", "pyarrow") if importlib.util.find_spec(name) is None]:
            raise Refusal(f"missing {' and '.join(missing)}: pip install 'deltaband[cli]'")
        from .app import run

        return run([word for word in words if word != "--debug"] or ["--help"])
    except KeyboardInterrupt:
        print("deltaband: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        print(f"deltaband: error: {strip_control_characters(one_line(error))}", file=sys.stderr)
        return error.code if isinstance(error, Refusal) else 1
