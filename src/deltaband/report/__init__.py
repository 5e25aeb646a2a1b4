"""One HTML file that shows how good a band is on rows with known targets: nothing to install, nothing to download."""

from .document import page, write

__all__ = ["page", "write"]
