"""Benchmarks that others have set, and other methods around the same networks: `python -m benchmarks.outside`."""
