"""An HTTP client of fp8serve's server, or of any other server with OpenAI's routes. This package does not import
torch."""
