"""Optional methods, each of which changes the model or its scales so that FP8 costs less.

precision     which linears stay in high precision        smoothing  channels of inputs evened out
input_scales  scales from a search instead of the maximum rounding   weights rounded layer by layer, by GPTQ
healing       training towards the output in high precision
"""
