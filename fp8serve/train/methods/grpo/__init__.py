"""Group relative policy optimisation (Shao et al. 2024): answers that were better than their siblings become likelier.

prompts        rows of files -> prompts
reader         prompts -> token ids
rollouts       the engine that answers them with this step's weights
grading        answers -> rewards, by a Python file in a process of its own or by a URL
reward_process that process
loss           rewards and log-probabilities -> losses
method         what the trainer calls
"""
