"""Data becomes a better checkpoint: the job's description, its data, its loop and its process.

    config  what a job is      data, order, batch  files -> rows -> steps -> flattened tensors
    validate  a dry run        forward, optimizer, evaluate  one step's arithmetic
    scratch  a model from nothing    trainer, setup, state  a run; checkpoint, carry  what it writes between steps
    job_process  the process it runs in  export  a checkpoint -> a served model        events  what it tells

`config`, `order`, `data`, `validate`, `events` and the start of `job_process` load no torch.
"""
