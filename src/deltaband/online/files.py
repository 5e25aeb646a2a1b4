"""The state of an object in time in a file of its own, which belongs to one calibrated band."""

import json
from pathlib import Path
from typing import Any

from ..errors import ArtefactError
from ..storage import container
from ..storage.encoding import Decoder, Encoder
from .scale import DeltaScale


def write(path: str | Path, kind: str, scale: DeltaScale, state: dict[str, Any]) -> None:
    """Write a state of this kind, or raise and leave the file that was there before."""
    encode = Encoder()
    texts = {kind: container.as_json({"band": scale.digest}), "tree": container.as_json(encode(state))}
    container.write(Path(path), encode.tensors, texts)


def read(path: str | Path, kind: str, scale: DeltaScale) -> dict[str, Any]:
    """Return the state that was written, or raise an ArtefactError if it is of another band."""
    tensors, texts = container.read(Path(path), kind)
    try:
        digest, state = json.loads(texts[kind])["band"], Decoder(tensors)(json.loads(texts["tree"]))
    except Exception as error:
        raise ArtefactError(f"{path} is not a file that this version understands: {error}") from error
    if digest != scale.digest:
        raise ArtefactError(
            f"{path} belongs to a band with other weights or another calibration: give the one it was made with"
        )
    return dict(state)
