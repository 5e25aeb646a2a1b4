"""`Alarm`: what a monitor has found, and what to do about it."""

from dataclasses import dataclass
from typing import Literal

from ..storage.encoding import storable

ADVICE = {
    "exchangeability": "calibrate on recent rows, band.calibrate(x, y); if they go on changing use band.online(), and "
    "train again if errors have grown",
    "leverage": "intervals rest on little there: look at the rows of the largest band.leverage(x), get targets for "
    "such rows, and train and fit with them; until then band.calibrate(x, y, target=new_inputs) counts rows like them",
    "coverage": "calibrate on recent rows, band.calibrate(x, y), or use band.online(), which keeps the coverage in the "
    "long run",
}


@storable
@dataclass(frozen=True)
class Alarm:
    """What a monitor has found, and what to do about it.

    Attributes:
        kind: "exchangeability" of errors, "leverage" of inputs, or "coverage".
        after: After how many rows (leverage) or targets it was raised.
        output: The number of the output; None where it is about all.
        statistic: The martingale, or the share of targets that were covered.
        limit: What the martingale has reached, or the level.
        false_alarms: The probability that an alarm of this kind is ever raised without a reason.
        message: What was found.
        advice: What to do.
    """

    kind: Literal["exchangeability", "leverage", "coverage"]
    after: int
    output: int | None
    statistic: float
    limit: float
    false_alarms: float
    message: str
    advice: str

    def __str__(self) -> str:
        of = "" if self.output is None else f", output {self.output}"
        return f"{self.kind}{of}: {self.message}; {self.advice}"
