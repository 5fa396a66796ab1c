"""Graphs that tests of declaration go through, right and wrong."""
