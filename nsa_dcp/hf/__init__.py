"""The embedded engine: transformers' own DSA models under decode context parallelism, on gloo or NCCL ranks."""
