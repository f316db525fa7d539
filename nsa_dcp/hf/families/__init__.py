"""The attention families of the embedded engine."""
