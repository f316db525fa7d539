"""What replaces the kernel calls of sglang's sparse backend, under TP-DCP and under CP-DCP."""
