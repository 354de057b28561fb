"""A conversation that is to be answered, as every family of routes asks for it: one request, read in one way."""
