"""Attention cases for compiled engines: what may be declared, drawn, run and judged."""
