"""Optional methods that change the model or its scales to reduce the error of FP8.

precision  selects the linears that stay in high precision
smoothing  reduces large channels of inputs
rounding   rounds weights layer by layer with GPTQ
healing    trains the FP8 model towards the output in high precision
"""
