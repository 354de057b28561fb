"""Models whose architecture has no family here, computed by transformers' own class.

`network.py` makes the class without weights, or says why it cannot be served, and gives it the interface of our
decoder: linear layers that FP8 may run, and attention by the caller, over a paged cache or the other tokens of a call.
`trial.py` runs it once on "meta", where nothing is computed, and records what its attention layers ask for: these
records and the file become a `ModelConfig`. When a model is loaded, `trial.py` compares its output with that of the
class's own eager attention.

transformers is imported here and nowhere else in the package, and only where a class is built: it takes seconds.
"""
