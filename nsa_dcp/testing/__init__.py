"""What this package's own tests use, shipped so that users can rerun the checks."""
