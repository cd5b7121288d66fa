"""Measurements, one command each: `python -m benchmarks.NAME --help`. Figures are compared within one run and never across runs."""
