"""Data becomes a better checkpoint."""
