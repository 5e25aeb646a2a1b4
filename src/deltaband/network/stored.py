"""How a file holds a network that computes rows again: by what its gradients are of, never by its weights."""

from collections.abc import Callable, Mapping
from typing import Any

from .network import Network


def network_hook(outputs: tuple[int, ...]) -> Mapping[type, Callable[[Any], Any]]:
    """Return the hook by which an `Encoder` writes a network that computes the rows of these outputs again."""
    return {Network: lambda network: (outputs, network.layers, network.probes)}


def network_maker(make: Callable[..., Network]) -> Mapping[str, Callable[[Any], Any]]:
    """Return the hook by which a `Decoder` restores such a network: `make(outputs, layers, probes)`."""
    return {Network.__name__: lambda about: make(*about)}
