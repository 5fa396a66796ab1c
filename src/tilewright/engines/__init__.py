"""Engines: code that can run a class of graphs. No engine imports another."""
