"""What tests read from machine code."""
