"""FSDP2 in the trainer: each process holds its rows of the weights, of the summed gradients and of the moments.

building  loads a directory as a sharded forward pass; sums gradients in the order of the microbatches
shards    divides parameters into rows; computes gradient norms; gathers full tensors for checkpoints

The results have the bits of one process: weights are cast with the scale of the full tensor, gradients are added in the
same order, and the norm is computed from the same rows. (The fused AdamW computes the elements after the last group of
16 with another rounding, so a shard whose size is no multiple of 16 may differ in its last bits.)
"""
