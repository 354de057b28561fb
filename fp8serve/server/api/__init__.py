"""The HTTP routes: this server's own, OpenAI's and Anthropic's, on one pipeline."""
