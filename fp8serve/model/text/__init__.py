"""Text and data: tokenizers, chat templates, whose words are whose, and rows of training data. No torch here."""
