"""From the socket to a handler and back: connections, middleware, event streams, uploads. Knows no model and no job."""
