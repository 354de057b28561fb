"""OpenAI's newer wire: `/v1/responses`."""
