"""Times of one rank's layer of a prefill chunk."""
