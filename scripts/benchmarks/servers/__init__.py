"""Decode steps, prefill and throughput of real sglang servers."""
