"""The native routes: generation as in text-generation-inference, models, fine-tune jobs and the server's state."""
