"""Runs models of architectures that fp8serve does not implement, with transformers' own model class.

`network.py` builds the class without weights and gives it the interface of our decoder: linear layers that FP8 may
run, and attention that the caller computes, for example over a paged KV cache. `class_trace.py` runs the class once on
the "meta" device and records the arguments of its attention calls, from which it makes a `ModelConfig`. When a model is
loaded, `class_trace.py` compares its output with that of the class's own eager attention.

No other package of fp8serve imports transformers. The import takes seconds, so it is delayed until a class is built.
"""
