"""Ctrl-C, held back where it would leave something half-done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run a block to its end, and raise what Ctrl-C would have raised then.

    Only the main thread is interrupted, and only there a handler can be set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, came = signal.getsignal(signal.SIGINT), list[tuple[Any, ...]]()
    try:
        if callable(before):
            signal.signal(signal.SIGINT, lambda *signals: came.append(signals))
        yield
    finally:
        if callable(before):
            signal.signal(signal.SIGINT, before)
            if came:
                before(*came[-1])
