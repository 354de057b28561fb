"""The commands, one module each: each reads options, calls one function of another package, and prints a summary or
JSON."""
