"""Numbers: tensors in, tensors out. Knows no model, no file and no request."""
