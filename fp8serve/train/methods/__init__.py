"""The methods of training: each is a package that defines its data, its loss and its measures.

    interface    what every method implements
    table        the methods by their names
    options      which options of a job belong to which method
    supervised   learns the next token, given those before it
    dpo          learns the better one of two answers
    grpo         learns from rewards of the model's own answers

All but the loss of a method loads no torch.
"""
