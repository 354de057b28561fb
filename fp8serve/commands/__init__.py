"""The commands, one module each. A command reads options, calls a function of another package, and prints a summary or
JSON."""
