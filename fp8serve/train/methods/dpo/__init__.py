"""Direct preference optimisation (Rafailov et al. 2023) and its kin: of two answers, the better one becomes likelier.

pairs     rows of files -> two examples each
reader    examples -> pairs of rows
loss      log-probabilities of pairs -> losses
method    what the trainer asks
"""
