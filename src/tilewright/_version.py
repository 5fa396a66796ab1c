"""The package's version, told here and nowhere else (the build reads this line)."""

__version__ = "0.1.0"
