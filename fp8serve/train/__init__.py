"""Training: the description of a job, its data, its loop and its process.

    config                         what a job is
    methods                        what can be minimised, a package each: its data, its loss, what it reports
    data, tokenized, order, batch  items -> steps -> flattened tensors
    validate                       a dry run
    forward, gradients, optimizer, held_out
                                   one step's arithmetic, and the loss on held-out items
    scratch                        a new model with random weights
    trainer, setup, state          a run
    sharded                        one whose weights are divided among processes
    checkpoint, carry              what a run writes between steps
    finishing, export              a checkpoint -> a served model
    events                         what a run reports
    job_process                    the process that a job runs in

`config`, `order`, `data`, `validate`, `events`, the readers of `methods` and the start of `job_process` load no torch.
"""
