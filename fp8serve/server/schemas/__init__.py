"""Requests and answers as pydantic models."""
