"""Summaries, tables and SVG pictures for terminals, notebooks and the report."""
