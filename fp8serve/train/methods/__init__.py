"""The training methods. Each of them defines how its data are read, its loss and its metrics.

    interface    what every method implements, and the choice of one
    options      the options of each method
    supervised   supervised fine-tuning: next-token prediction
    dpo          direct preference optimisation: the better one of two completions becomes more likely
    grpo         reinforcement learning from rewards of the model's own completions

Only the modules that compute a loss import torch.
"""
