"""Training: the configuration of a job, its data, its loop and its processes.

    config                the configuration of a job
    methods               the training methods: data, loss and metrics of each
    data, token_cache     rows, items and their order; the cache of tokenized data
    validate, memory      dry runs and memory estimates
    forward, train_step, optimizer
                          the computation of one step
    log_probs             log-probabilities for comparison with a server
    trainer               the loop and `fp8serve.finetune`
    setup, run            its initialisation; the state that its modules share, and validation losses
    health                reports on single steps
    checkpoint, checkpointing, state
                          the files of a checkpoint; when to write one, and the return to one after a divergence; a
                          run's state as tensors
    sharded               runs with sharded weights
    lora                  runs that train an adapter
    export                exports a checkpoint as a servable model
    events                events in a run's log; metrics for TensorBoard and Weights & Biases
    job_process, group    the processes of a job
    scratch               a new model with random weights

`config`, `data`, `validate`, `events`, the readers of `methods` and the start of `job_process` import no torch.
"""
