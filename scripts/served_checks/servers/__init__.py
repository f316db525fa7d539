"""A real server: the command line of a configuration, its process, and all ranks on one GPU."""
