"""The commands, registered with typer, which reads the options."""

import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..errors import DeltabandWarning
from ..version import __version__
from .demo import demo
from .export import export
from .fit import fit, plan
from .monitor import monitor
from .options import as_typed
from .output import Refusal, Usage, say, with_type
from .predict import evaluate, inspect, predict, report

app = typer.Typer(
    name="deltaband",
    add_completion=False,
    rich_markup_mode=None,  # plain help, as it is written
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for command in (plan, fit, predict, evaluate, monitor, export, inspect, report, demo):
    app.command()(command)


@app.callback()
def about(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from; allowed anywhere.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    """Prediction intervals for neural networks that are already trained.

    \b
    From a trained network to intervals:
      deltaband plan network:make --train train.csv --target price
      deltaband fit network:make --weights w.safetensors --train train.csv --target price --standardise \\
          --weight-decay 1e-3 --out price.band
      deltaband predict price.band --model network:make --data new.csv --out new_with_bands.csv
      deltaband evaluate price.band --model network:make --data test.csv

    network:make is the function make in network.py of the current folder, which returns the torch.nn.Module. `deltaband
    COMMAND --help` has more. Exit codes: 0 done, 1 refused, 2 wrong options, 130 interrupted.
    """


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; wrong options are a `Usage` error."""
    if list(arguments) == ["--version"]:
        print(f"deltaband {__version__}")
        return 0
    said: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = as_typed(" ".join(str(message).split()))
        if text not in said:  # one line for all batches
            say(f"warning: {text}")
        said.add(text)

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            warnings.simplefilter("default", DeltabandWarning)
            warnings.simplefilter("ignore", FutureWarning)  # torch's, for its own developers
            warnings.filterwarnings("ignore", "X does not have valid feature names")  # they were compared at fit
            code = typer.main.get_command(app).main(list(arguments), prog_name="deltaband", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except (Refusal, MemoryError, OSError):
        raise
    except (ValueError, TypeError) as error:
        raise Refusal(as_typed(str(error)) or with_type(error)) from error
    except Exception as error:
        if not hasattr(error, "format_message"):  # only errors of typer have it, in whichever module it keeps them
            raise
        path = getattr(getattr(error, "ctx", None), "command_path", "deltaband")
        raise Usage(f"{error.format_message().rstrip('.')}; see {path} --help") from error
    if code == 130:  # newer versions return the code of an interrupt
        raise KeyboardInterrupt
    return int(code or 0)
