"""Text and data: tokenizers, chat templates, the assistant's turns in a text, and rows of training data. No torch
here."""
