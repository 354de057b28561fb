"""Anthropic's wire: `/v1/messages`."""
