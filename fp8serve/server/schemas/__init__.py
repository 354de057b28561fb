"""Pydantic models of request bodies."""
