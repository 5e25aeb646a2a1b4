"""The user's network, from the name of a factory or from a file, with its weights or with its band file."""

import importlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import storage
from ..classification import ClassificationIntervals
from ..estimator import Estimator
from ..intervals import PredictionIntervals
from .initialised import RandomNumbers
from .output import Refusal, Usage, check_file, join_names, near, one_line, with_type
from .weights import load_weights, set_weights

KINDS: dict[str, type[Estimator]] = {each.__name__: each for each in (PredictionIntervals, ClassificationIntervals)}
TRANSFORMS = ("input_transform", "target_transform")  # that a factory may return after the network, in this order


@dataclass(frozen=True)
class Made:
    """What a factory returned, or a file of torch.export."""

    network: nn.Module  # in eval mode
    transforms: dict[str, Any] = field(default_factory=dict)  # those of TRANSFORMS that it returned
    initial: Sequence[str] = ()  # weights that are still the random numbers of their initialisation

    @property
    def dtype(self) -> torch.dtype:
        weights = self.network.parameters()
        return next((w.dtype for w in weights if w.is_floating_point() and w.requires_grad), torch.float32)


class LoadedBand(NamedTuple):
    band: Any  # one of KINDS
    dtype: torch.dtype  # that inputs are given in
    features: list[str]
    targets: list[str]
    groups: str | None = None  # the column that the groups of the calibration were in


def load_band(
    path: Path,
    model: str | None,
    trust: bool,
    features: Sequence[str] | None,
    targets: Sequence[str] | None,
    kinds: Collection[str] = tuple(KINDS),
) -> LoadedBand:
    """Load a band file into the network that `model` names; column names are given only if the file has none."""
    about = storage.inspect(check_file(path))
    if about["kind"] not in kinds:
        raise Refusal(f"{path} holds {about['kind']}: this command takes {' or '.join(kinds)}")
    if model is None:
        named = about["notes"].get("model", "package.module:factory")
        option = f"--model {named} --trust" if named.endswith(".pt2") else f"--model {named}"
        raise Usage(f"{path} needs the network it was fitted with: pass {option}, if you trust that code")
    names = []
    for kind, given, option in (("features", features, "--features"), ("targets", targets, "--target")):
        saved = about["notes"].get(kind)
        if saved is not None and given:
            raise Usage(f"{path} already names its {kind}: {saved}; they cannot be changed")
        if saved is None and not given:
            raise Usage(f"{path} was saved without the names of its {kind}: give {option}")
        names.append(",".join(given).split(",") if given else list(json.loads(saved)))
    made = load_network(model, trust=trust)
    if about["holds_weights"]:  # otherwise the factory's own must be those of the fit, which loading checks
        set_weights(made.network, storage.weights(path), path)
    if missing := next((name for name in TRANSFORMS if name in about["functions"].keys() - made.transforms), None):
        function = f"{missing}={about['functions'][missing]}"
        raise Refusal(f"{path} was fitted with {function}, which no file holds: let the factory of --model return it")
    needed = {name: each for name, each in made.transforms.items() if name in about["functions"]}
    band = KINDS[about["kind"]].load(path, made.network, **needed)
    dtype = inputs_dtype(made, band.spec.input_transform is not None)
    return LoadedBand(band, dtype, names[0], names[1], about["notes"].get("groups"))


def load_network(model: str, weights: Path | None = None, trust: bool = False, watched: bool = False) -> Made:
    """Make the network; nothing is imported but the module that `model` names. `watched` is for `check_trained`."""
    with redirect_stdout(sys.stderr):
        if model.endswith(".pt2"):
            made = Made(_load_exported(Path(model), trust))
        elif watched:
            RandomNumbers.load()
            with current_folder_first(), RandomNumbers() as random_numbers:
                made = _make(model)
            made = replace(made, initial=list(random_numbers.names(made.network)))
        else:
            with current_folder_first():
                made = _make(model)
    if weights is not None:
        load_weights(made.network, check_file(weights))
    return made


def inputs_dtype(made: Made, transformed: bool) -> torch.dtype:
    """Return the precision of inputs: that of the network, but float64 where they are transformed before rounding."""
    return torch.float64 if transformed else made.dtype


def check_trained(made: Made, model: str) -> None:
    """Raise if weights are still those of the initialisation, which nobody wants intervals for."""
    if made.initial:
        what = (
            f"the weights of {model} are the random numbers that it was initialised with ({join_names(made.initial)})"
        )
        advice = "give --weights FILE, or let the factory load them; if they are right, give --own-weights"
        raise Refusal(f"{what}: {advice}")


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Put the current folder first in `sys.path`, as `python -m` does, and after what is installed afterwards."""
    here = str(Path.cwd())
    if here in sys.path[:-1]:  # the user has put it there
        yield
        return
    sys.path[:] = [here, *(each for each in sys.path if each != here)]
    try:
        yield
    finally:
        sys.path[:] = [*(each for each in sys.path if each != here), here]


def _make(model: str) -> Made:
    module_name, _, path = model.partition(":")
    if not module_name or not path:
        raise Usage(f"MODEL must be package.module:factory, or a .pt2 file of torch.export, got {model!r}")
    if module_name.endswith(".py") or "/" in module_name:
        named = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise Usage(f"MODEL must name a module, not a file: {named}:{path}")
    value = import_module(module_name)
    for part in path.split("."):
        if not hasattr(value, part):
            known = [name for name in vars(value) if callable(getattr(value, name))]
            raise Refusal(f"module {module_name} has no {part!r}{near(part, known)}")
        value = getattr(value, part)
    try:
        returned = value() if callable(value) and not isinstance(value, nn.Module) else value
    except (Exception, SystemExit) as error:
        raise Refusal(f"{model} raised {with_type(error)}") from error
    network, transforms = _network_and_transforms(returned, model)
    return Made(network.eval(), transforms)


def _network_and_transforms(returned: Any, model: str) -> tuple[nn.Module, dict[str, Any]]:
    parts = returned if isinstance(returned, Mapping) else {"model": returned}
    if isinstance(returned, tuple | list) and len(returned) <= 1 + len(TRANSFORMS):
        parts = dict(zip(("model", *TRANSFORMS), returned, strict=False))
    if unknown := next((name for name in parts if name not in ("model", *TRANSFORMS)), None):
        expected = f"expected model, {' and '.join(TRANSFORMS)}"
        raise Refusal(f"{model} returns a dictionary with {unknown!r}; {expected}")
    network = parts.get("model")
    if not isinstance(network, nn.Module):
        expected = "a torch.nn.Module is expected, or a function without arguments that returns one"
        raise Refusal(f"{model} gives {type(network).__name__}; {expected}, alone or with {' and '.join(TRANSFORMS)}")
    return network, {name: parts[name] for name in TRANSFORMS if parts.get(name) is not None}


@current_folder_first()
def import_module(name: str, option: str = "") -> Any:
    """Import a module of the user's; an error begins with the option that names it."""
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise Refusal(f"{option}importing {name} failed: {with_type(error)}") from error
        hint = near(missing, [path.stem for path in Path().glob("*.py")])
        where = "neither in the current folder nor installed"
        raise Refusal(f"{option}there is no module {missing!r}{hint}, {where}") from error


def _load_exported(path: Path, trust: bool) -> nn.Module:
    if not trust:
        raise Refusal(f"loading {path} can run code that is in it: give --trust if you know where it comes from")
    check_file(path)
    try:
        program = torch.export.load(path)
    except Exception as error:
        raise Refusal(f"{path} could not be loaded by torch.export.load: {one_line(error)}") from error
    for node in program.graph.nodes:
        example = node.meta.get("val") if node.name in program.graph_signature.user_inputs else None
        rows = (*example.shape, 1)[0] if isinstance(example, Tensor) else None  # one row without dimensions
        if isinstance(rows, int):
            how = "give torch.export.export a dynamic batch dimension, dynamic_shapes=({0: torch.export.Dim('rows')},)"
            raise Refusal(f"{path} was exported for batches of {rows} rows: {how}")
        if node.op == "call_function" and _is_in_training_mode(node):
            raise Refusal(f"{path} was exported in training mode (see {node.name}): call model.eval() first")
    return program.module()


def _is_in_training_mode(node: Any) -> bool:
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    given = dict(zip((each.name for each in arguments), node.args, strict=False)) | dict(node.kwargs)
    dropout = given.get("dropout_p", 0.0)
    return given.get("train") is True or given.get("training") is True or (isinstance(dropout, float) and dropout > 0)
