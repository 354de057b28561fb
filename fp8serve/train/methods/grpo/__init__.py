"""Group relative policy optimisation (Shao et al. 2024): answers that were better than their siblings become likelier.

data           rows of files -> prompts, as token ids
rollouts       the engine that answers them with this step's weights
grading        answers -> rewards, by a Python file in a process of its own or by a URL
reward_process that process
method         what the trainer calls, and the losses
"""
