"""Times of single ops, beside the stock code that they stand in for."""
