"""`config.json` becomes the hyper-parameters of a model, by the table of families. No torch here."""
