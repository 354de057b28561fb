"""The routes, in two families that share one pipeline."""
