"""Models with KV heads (GQA, MHA): which DCP sizes gain, and what a node holds."""
