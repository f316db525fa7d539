"""The time that a decode step takes, predicted from measurements: the `model` command's arithmetic."""
