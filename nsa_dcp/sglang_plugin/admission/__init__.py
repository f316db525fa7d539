"""Every verdict on a server's command, from its settings alone: no torch, and sglang for its parser only."""
