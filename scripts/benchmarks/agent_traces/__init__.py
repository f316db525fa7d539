"""An agent's recorded calls, replayed against servers."""
