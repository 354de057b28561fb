"""Parsers of a model's output, streamed or complete: they separate reasoning, content and tool calls."""
