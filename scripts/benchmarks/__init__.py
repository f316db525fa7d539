"""Benchmarks, each in a folder of its own with a `bench` module that is run."""
