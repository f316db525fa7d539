"""Real servers asked fixed requests, and their answers compared."""
