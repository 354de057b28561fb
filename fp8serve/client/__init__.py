"""The other side of HTTP: a client of our server, or of any that has OpenAI's routes. Without torch."""
