"""The declarative layer: tensors, operations, inference, checks, JSON. Pure Python, no torch."""
