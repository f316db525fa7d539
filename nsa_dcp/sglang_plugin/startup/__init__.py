"""What runs once in each scheduler: checks of the model and the pool, then the backend that will serve."""
