"""Selections that are the same on every rank, computed by each rank for its share of a step's rows."""
