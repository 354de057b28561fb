"""`fp8serve demo`: the main job from end to end, on a model that people can talk to, or on one trained from nothing.

`demo` is what both have in common: stages, figures, cleaning up, and the steps over HTTP. `smollm2` runs it on real
weights, `from_scratch` on a model that it trains first. `choice` says which of the two a machine gets.
"""
