"""The ATen engine: every operation of the vocabulary, on any device that torch has."""
