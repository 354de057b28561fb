"""The native routes: generation, models, fine-tune jobs and the server's state."""
