"""The client side of HTTP: a client of our server, or of any server with OpenAI's routes. Without torch."""
