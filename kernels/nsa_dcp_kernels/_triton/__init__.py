"""Triton kernels of the memory-bound ops, one module per public module.

A launch function takes tensors that the public function has checked. It allocates its outputs and nothing else, reads
no device value on the host, and can be captured in a CUDA graph. Under TRITON_INTERPRET=1 it also takes CPU tensors.
"""
