"""What objects in time share: they belong to one calibrated band, and their state has a file of its own."""

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

from ..display import element
from ..errors import ArtefactError
from ..storage import container
from ..storage.encoding import Decoder, Encoder
from .scale import Band, DeltaScale


class KeptInFile(ABC):
    """An object in time that a file can hold, apart from the calibrated band that it was made from."""

    _kind: ClassVar[str]  # of a file
    _scale: DeltaScale

    @abstractmethod
    def summary(self) -> str:
        """Return how things stand, as text."""

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return element("pre", self.summary())

    def save(self, path: str | Path) -> None:
        """Write the state to a file, or raise and leave the file that was there before; the band is saved on its own.

        Args:
            path: The file.
        """
        encode = Encoder()
        texts = {self._kind: {"band": self._scale.digest}, "tree": encode(self._state())}
        container.write(Path(path), encode.tensors, {name: container.as_json(each) for name, each in texts.items()})

    @classmethod
    def load(cls, path: str | Path, band: Band) -> Self:
        """Return what was saved; it continues as if nothing had happened, bit for bit.

        Args:
            path: The file.
            band: The calibrated band that it was made from, or the same from a file.

        Returns:
            The object.

        Raises:
            ArtefactError: If the file is damaged or belongs to another band.
        """
        scale = DeltaScale.of(band)
        tensors, texts = container.read(Path(path), cls._kind)
        try:
            digest, state = json.loads(texts[cls._kind])["band"], Decoder(tensors)(json.loads(texts["tree"]))
        except Exception as error:
            raise ArtefactError(f"{path} is not a file that this version understands: {error}") from error
        if digest != scale.digest:
            raise ArtefactError(
                f"{path} belongs to a band with other weights or another calibration: give the one it was made with"
            )
        return cls._from_state(scale, state)

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return the state as values that a file can hold."""

    @classmethod
    @abstractmethod
    def _from_state(cls, scale: DeltaScale, state: dict[str, Any]) -> Self: ...
