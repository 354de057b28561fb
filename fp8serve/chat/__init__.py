"""A conversation in the terminal, with a model in this process or behind a server."""
