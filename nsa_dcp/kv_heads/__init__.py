"""The algorithm for models with KV heads (GQA, MHA): which splits there are, and attention over a group."""
