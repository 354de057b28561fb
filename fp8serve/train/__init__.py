"""Training: the description of a job, its data, its loop and its process.

    config                a job, and its options by method
    methods               what can be minimised: a method's data, loss and measures
    data, tokenized       rows, items, their order; kept in a run's directory
    validate, memory      a dry run, and an estimate of memory
    forward, train_step, optimizer
                          one step's arithmetic
    trainer, setup, run   the loop, and what its parts share
    validation, recovery, health
                          losses on held-out items, divergence and the way back, trouble in single steps
    checkpoint, checkpointing, state
                          the files of a checkpoint, when one is written, and a run's state as tensors
    sharded               a run whose weights are divided among processes
    export                a checkpoint -> a served model
    events, reporting     what a run reports, to its log and to other tools
    job_process, group    the process, or processes, that a job runs in
    scratch               a new model with random weights

`config`, `data`, `validate`, `events`, the readers of `methods` and the start of `job_process` load no torch.
"""
