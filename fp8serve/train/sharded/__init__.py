"""FSDP2 in the trainer: every process holds its rows of the weights, their gradients' sums and their moments.

building  a directory -> a forward pass over shards; gradients, added in the order of the microbatches
shards    which rows are whose; the masters, their norm, and whole tensors for checkpoints

The bits are those of one process: weights are cast by the scale of the whole, gradients are added in the same order,
and the norm is computed from the same rows. (AdamW computes what is left over after groups of 16 numbers with another
rounding, so that a shard which is no multiple of 16 may differ in its last bits.)
"""
