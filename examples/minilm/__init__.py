"""Sentence embeddings with PyTorch's attention and norms, and with Tilewright's."""
