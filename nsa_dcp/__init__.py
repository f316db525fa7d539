"""Decode context parallelism (DCP) for DeepSeek Sparse Attention (DSA) models on Hopper."""

__version__ = "0.1.0"

__all__ = ["__version__"]
