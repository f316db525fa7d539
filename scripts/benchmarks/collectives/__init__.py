"""Times of a step's collectives, and their share of it."""
