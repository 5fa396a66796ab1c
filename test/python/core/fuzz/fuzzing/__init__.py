"""Random graphs: how they are drawn, run between guard bytes, and judged."""
