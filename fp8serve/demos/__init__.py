"""`fp8serve demo`: the main job from end to end, on a chat model, or on a model trained from random weights.

`demo` has the common part: stages, figures, cleaning up, and the steps over HTTP. `smollm2` runs it on real weights,
`from_scratch` on a model that it trains first. `commands/demo.py` chooses.
"""
