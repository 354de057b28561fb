"""Adapters to programs that run fp8serve: Ray and Dynamo."""
