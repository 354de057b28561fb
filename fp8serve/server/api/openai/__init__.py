"""The routes of OpenAI's API under /v1."""
