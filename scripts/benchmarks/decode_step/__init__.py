"""Times of one rank's whole decode step."""
