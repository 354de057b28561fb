"""A conversation to be answered, in the common form of all families of routes."""
