"""Ctrl-C before a chosen line of the package, as the system sends it."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import deltaband

PACKAGE = str(Path(deltaband.__file__).parent)


class Interrupter:
    """Counts the lines of the package that a call runs in this thread, and sends SIGINT before one of them."""

    def __init__(self, moment: int | None = None) -> None:
        self.lines, self._moment = 0, moment

    def __call__(self, call: Callable[[], object]) -> bool:
        """Run the call; return whether it was interrupted."""
        before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self._enter)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
            signal.signal(signal.SIGINT, handler)
        return False

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            if self.lines == self._moment:
                signal.raise_signal(signal.SIGINT)
            self.lines += 1
        return self._line
