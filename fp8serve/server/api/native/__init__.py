"""The native routes: text-generation-inference's shapes, fine-tuning, and the server itself."""
