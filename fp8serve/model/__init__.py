"""A directory becomes a module, and back."""
