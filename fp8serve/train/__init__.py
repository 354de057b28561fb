"""Training: the configuration of a job, its data, its loop and its processes.

    config, run_options   the configuration of a job
    methods               the training methods: data, loss and metrics of each
    data, token_cache     rows, items and their order; the cache of tokenized data
    validate, memory      dry runs and memory estimates
    forward, train_step, optimizer
                          the computation of one step
    log_probs             log-probabilities for comparison with a server
    trainer, setup, run   the loop, its initialisation, and the state that its modules share
    validation, recovery, health
                          validation losses; return to a checkpoint after a divergence; reports on single steps
    checkpoint, checkpointing, state
                          the files of a checkpoint; when to write one; a run's state as tensors
    sharded               runs with sharded weights
    lora                  runs that train an adapter
    export                exports a checkpoint as a servable model
    events, reporting     events in a run's log; metrics for TensorBoard and Weights & Biases
    job_process, group    the processes of a job
    finetune              `fp8serve.finetune`
    scratch               a new model with random weights

`config`, `data`, `validate`, `events`, the readers of `methods` and the start of `job_process` import no torch.
"""
