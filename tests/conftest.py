"""Shared fixtures. One torch thread: the suite also runs beside other work, and results do not depend on it."""
