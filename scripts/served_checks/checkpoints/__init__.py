"""What the checkpoints that are served hold: weights that look tokens up, and their quantised forms."""
