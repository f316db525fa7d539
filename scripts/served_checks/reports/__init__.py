"""What servers answered, as reports hold it, as the repository keeps it, and as its page shows it."""
