"""Numbers as text, and SVG pictures, for terminals, notebooks and the report."""
