"""One file an operation family: its records, and the methods that declare them on a graph."""
