"""What a run says of itself while it trains: it could speak every epoch, but nobody reads that fast."""

from __future__ import annotations

import time

from tqdm import tqdm

from .training import Report

SECONDS = 1.0


def seldom(say: Report) -> Report:
    """At most one text a second gets through."""
    said = -SECONDS

    def report(text: str) -> None:
        nonlocal said
        if time.monotonic() >= said + SECONDS:
            said = time.monotonic()
            say(text)

    return report


def beside(bar: tqdm) -> Report:
    """Texts beside a bar; in a log, where each would be a line, they wait for the bar's next step."""
    return seldom(lambda text: bar.set_postfix_str(text, refresh=bar.fp.isatty()))
