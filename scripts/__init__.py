"""What an operator runs, and beneath it benchmarks and checks of servers, run with `python -m` from a checkout."""
