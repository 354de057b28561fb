"""Data becomes a better checkpoint: the job's description, its data, its loop and its process.

    config                         what a job is
    data, order, batch             files -> rows -> steps -> flattened tensors
    validate                       a dry run
    forward, optimizer, held_out   one step's arithmetic, and the loss on held-out rows
    scratch                        a model from nothing
    trainer, setup, state          a run
    checkpoint, carry              what it writes between steps
    export                         a checkpoint -> a served model
    events                         what it tells
    job_process                    the process that it runs in

`config`, `order`, `data`, `validate`, `events` and the start of `job_process` load no torch.
"""
