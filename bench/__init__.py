"""Benchmarks: `python -m bench.NAME`, or `make bench` for all. Each compares in one run on one machine."""
