"""Tokens a node holds and the time a step takes, computed from a model's dimensions: no torch, no sglang."""
