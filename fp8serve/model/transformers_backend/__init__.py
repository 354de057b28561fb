"""Models whose architecture has no family here, computed by transformers' own class.

`building.py` makes the class without weights, or says why it cannot be served. `trial.py` runs it once on "meta", where
nothing is computed, and writes down what its attention layers ask for: that and the file become a `ModelConfig`.
`network.py` gives the class the interface of our decoder: linear layers that FP8 may run, and attention that is the
caller's, over a paged cache or the other tokens of a call. What a model of a class says is compared with the class's
own eager attention when it is loaded (`check.py`).

transformers is imported here and nowhere else in the package, and only where a class is built: it takes seconds.
"""

from fp8serve.model.transformers_backend.network import TransformersModel
from fp8serve.model.transformers_backend.trial import describe

__all__ = ["TransformersModel", "describe"]
