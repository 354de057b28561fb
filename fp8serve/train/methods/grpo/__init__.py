"""Group relative policy optimisation (Shao et al. 2024): completions with a higher reward than the other completions of
the same prompt become more likely.

data            reads rows of files as prompts and tokenizes them
rollouts        generates completions with the engine and the weights of the current step
grading         computes rewards with a user's Python file or a URL
reward_process  the child process that runs the user's Python file
method          the losses, and the method that the trainer calls
"""
