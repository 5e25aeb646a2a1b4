"""What ends a command with one line, not with a traceback."""

from __future__ import annotations


class Unusable(Exception):  # noqa: N818
    """Something that the user gave, and can mend: a data set or a file of results."""
