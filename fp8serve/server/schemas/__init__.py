"""What clients may send and what they are answered, as pydantic models."""
