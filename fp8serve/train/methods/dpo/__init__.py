"""Direct preference optimisation (Rafailov et al. 2023) and its variants: the better of two answers becomes likelier.

pairs     rows of files -> two examples each
reader    examples -> pairs of rows
loss      log-probabilities of pairs -> losses
method    what the trainer calls
"""
