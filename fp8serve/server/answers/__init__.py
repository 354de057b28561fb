"""Turns the text of a model into an answer: reasoning, content and tool calls, streamed or at the end."""
