"""Estimates the memory of a fine-tune from the sizes in config.json, without weights and without torch.

The estimate counts the matrices of every family: attention, latent attention, dense MLPs and experts. It counts neither
biases nor the masks and buffers of a model that the transformers backend computes.
"""

from fp8serve.errors import JobError
from fp8serve.fp8.recipe import fp8_gather_obstacle
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.train.config import TrainConfig

# Bytes that a layer keeps for the backward pass:
HIDDEN_BYTES = 30  # for each element of a token's hidden state
MLP_BYTES = 14  # for each element of a token's MLP activation
EXPERT_INPUT_BYTES = 8  # for each element of the hidden state and each expert that receives the token
LOGITS_PER_CHUNK = 1 << 20  # elements that forward.py converts to FP32 at a time


def memory_estimate(
    model: ModelConfig, config: TrainConfig, tokens: int, fraction: float, processes: int = 1
) -> dict[str, int]:
    """Returns the bytes of each process by part, and their peak as "total".

    A microbatch has `tokens` tokens (with grpo, prompt tokens), of which `fraction` are in the loss mask. The parts are

        weights      masters and moments of all weights; with masters in the optimizer also the BF16 model
        gradients    in FP32; with masters in the optimizer also in BF16
        casts        quantized weights and BF16 casts of others during a step; with `fsdp` the gathered weights
        activations  tensors that layers keep for the backward pass
        logits       BF16 logits and their gradients of tokens in the loss mask, and one chunk in FP32
        engine       weights and KV cache of the engine that generates completions (grpo)

    The backward pass frees activations while it computes gradients, so the peak contains the larger of the two. With
    gradient accumulation the gradients exist from the start, so the peak contains both.
    """
    if config.method == "grpo":
        completion_tokens = config.batch_size * config.num_generations * config.max_completion_tokens
        tokens = config.num_generations * tokens + completion_tokens
        fraction = completion_tokens / tokens
    if config.lora_rank is not None:
        return _adapter_estimate(model, config, tokens, fraction)
    linears, others = parameter_counts(model)
    total, norms, in_model = linears + others, _norm_weights(model), config.master_weights == "model"
    if config.fsdp and processes > 1:
        return _sharded_estimate(model, config, tokens, fraction, processes)
    recipe = config.fp8_recipe
    parts = {
        "weights": total * (4 if in_model else 6) + _moments_bytes(config, total - norms, norms),
        "gradients": total * (4 if in_model else 6),
        "casts": 2 * others + linears * _cast_bytes(config),
        "activations": tokens * _bytes_per_token(model, config),
        "logits": _logits_bytes(int(tokens * fraction) * model.vocab_size),
    }
    if config.method == "grpo":
        cache_bytes = 2 * 2 * tokens * model.num_layers * model.num_kv_heads * model.head_dim  # keys and values, BF16
        parts["engine"] = linears * (2 if recipe is None else 1) + 2 * others + cache_bytes
    forward_bytes = parts["activations"] + parts["logits"]
    peak = max(parts["gradients"], forward_bytes) if config.accumulate == 1 else parts["gradients"] + forward_bytes
    return {**parts, "total": parts["weights"] + parts["casts"] + parts.get("engine", 0) + peak}


def _cast_bytes(config: TrainConfig) -> int:
    """Returns the bytes of the casts of a weight that forward and backward pass use, for each element."""
    recipe = config.fp8_recipe
    if recipe is None:
        return 2  # BF16
    spec = recipe.specs.linear["weight"]
    if spec.is_nvfp4:
        return 4  # BF16 values, and those of the transpose
    return 1 if spec.serves_both_directions else 2


def _sharded_estimate(
    model: ModelConfig, config: TrainConfig, tokens: int, fraction: float, processes: int
) -> dict[str, int]:
    """Returns the estimate with `fsdp`. "gradients" contains this process's shard of the summed gradients, and the
    gradients of the largest unit that are sent and received. "casts" contains two gathered layers, because FSDP2
    prefetches one, and the embedding and the head in BF16."""
    linears, others = parameter_counts(model)
    total, layer = linears + others, linears // model.num_layers
    unsharded = 4 * total + _moments_bytes(config, total - _norm_weights(model), _norm_weights(model))
    in_fp8 = fp8_gather_obstacle(config.fp8_recipe) is None
    itemsize = 1 if in_fp8 else 2 if config.fp8_recipe is None or config.master_weights == "optimizer" else 4
    cast = 0 if config.fp8_recipe is None else linears * _cast_bytes(config)
    saved_cast = cast // processes if in_fp8 else cast // model.num_layers if config.recompute else cast
    parts = {
        "weights": unsharded // processes,
        "gradients": 4 * total // processes + 8 * max(layer, others),
        "casts": 2 * others + 2 * itemsize * layer + saved_cast,
        "activations": tokens * _bytes_per_token(model, config),
        "logits": _logits_bytes(int(tokens * fraction) * model.vocab_size),
    }
    return {**parts, "total": sum(parts.values())}


def _logits_bytes(elements: int) -> int:
    return 4 * elements + 8 * min(elements, LOGITS_PER_CHUNK)


def moments_bytes(elements: int, in_8bit: bool) -> int:
    """Returns the bytes of both moments: in FP32, or in 8 bits with an FP32 scale for each 256 elements."""
    return 2 * elements + elements // 32 if in_8bit else 8 * elements


def _moments_bytes(config: TrainConfig, in_matrices: int, others: int) -> int:
    return moments_bytes(in_matrices, config.optimizer_states == "8bit") + moments_bytes(others, False)


def check_layers(config: TrainConfig, model: ModelConfig) -> None:
    """Raises JobError if an option that works layer by layer is set for a model that transformers computes as a
    whole."""
    for name in ("recompute", "fsdp", "compile"):
        if getattr(config, name) and model.computed_by is not None:
            reason = "works layer by layer, but transformers computes this model as a whole"
            raise JobError(f"{name} {reason}; leave it out.")


def _adapter_estimate(model: ModelConfig, config: TrainConfig, tokens: int, fraction: float) -> dict[str, int]:
    """Returns the estimate for an adapter at every projection. Weights are those of the served base model, and the
    adapter with its moments."""
    linears, others = parameter_counts(model)
    sides, rank = _adapter_sides(model), config.lora_rank or 0
    adapter = rank * sides + (sides // 2 if config.dora else 0)  # about half of the sides are outputs
    adapter_bytes = 4 * adapter + _moments_bytes(config, adapter, 0)
    parts = {
        "weights": linears * (2 if config.recipe == "bf16" else 1) + 2 * others + adapter_bytes,
        "gradients": 4 * adapter,
        "casts": model.hidden_size * model.intermediate_size,  # the transpose of the largest weight
        "activations": tokens
        * (_bytes_per_token(model, config) + 2 * rank * 7 * (1 if config.recompute else model.num_layers)),
        "logits": _logits_bytes(int(tokens * fraction) * model.vocab_size),
    }
    return {**parts, "total": sum(parts.values())}


def _adapter_sides(model: ModelConfig) -> int:
    """Returns the sum of the input and output sizes of all projections with an adapter; routed experts have none."""
    width, heads, latent = model.hidden_size, model.num_heads * model.head_dim, model.latent
    attention = 4 * width + 2 * heads + 2 * model.num_kv_heads * model.head_dim
    if latent is not None:
        query = model.num_heads * (latent.nope + latent.rope)
        queries = width + query if latent.q_rank is None else width + 2 * latent.q_rank + query
        attention = queries + 2 * width + latent.rank + latent.rope + model.num_heads * latent.value
    sparse, experts = _sparse_layers(model), model.experts
    shared = 0 if experts is None or not experts.shared_size else 3 * (width + experts.shared_size)
    projections = 2 if model.activation == "xielu" else 3
    dense = (model.num_layers - sparse) * projections * (width + model.intermediate_size)
    return model.num_layers * attention + dense + sparse * shared


def parameter_counts(model: ModelConfig) -> tuple[int, int]:
    """Returns (weights of the projections that can run in FP8, all other parameters without biases)."""
    sparse, experts = _sparse_layers(model), model.experts
    attention, absorbed = _attention_counts(model)
    dense_mlp = (2 if model.activation == "xielu" else 3) * model.hidden_size * model.intermediate_size
    linears = model.num_layers * attention + (model.num_layers - sparse) * dense_mlp
    others = model.num_layers * absorbed
    if experts is not None:
        shared = experts.shared_size or 0
        linears += sparse * (
            experts.count * _gated_mlp_weights(model, experts.size) + _gated_mlp_weights(model, shared)
        )
        gates = experts.count + (1 if experts.names.shared_gate is not None else 0)
        others += sparse * gates * model.hidden_size
    heads = 1 if model.tie_word_embeddings else 2
    return linears, others + heads * model.vocab_size * model.hidden_size + _norm_weights(model)


def _attention_counts(model: ModelConfig) -> tuple[int, int]:
    """Returns the weights of one layer's attention: (linear layers, the weight that latent attention applies head by
    head)."""
    width, latent = model.hidden_size, model.latent
    if latent is None:
        return width * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads), 0
    query = model.num_heads * (latent.nope + latent.rope)
    queries = width * query if latent.q_rank is None else latent.q_rank * (width + query)
    keys_and_output = width * (latent.rank + latent.rope) + model.num_heads * latent.value * width
    return queries + keys_and_output, model.num_heads * (latent.nope + latent.value) * latent.rank


def _gated_mlp_weights(model: ModelConfig, size: int) -> int:
    return 3 * model.hidden_size * size


def _norm_weights(model: ModelConfig) -> int:
    """Returns the weights of two norms a layer and of the final norm. Some families have more norms, as small."""
    latent = 0 if model.latent is None else model.latent.rank + (model.latent.q_rank or 0)
    return (2 * model.num_layers + 1) * model.hidden_size + model.num_layers * latent


def _sparse_layers(model: ModelConfig) -> int:
    return 0 if model.experts is None else len(model.experts.layers)


def _bytes_per_token(model: ModelConfig, config: TrainConfig) -> int:
    """Returns the bytes of activations a token at the peak. With `recompute` these are the inputs of all layers, and
    the activations of one layer."""
    if not config.recompute:
        return _activation_bytes_per_token(model)
    return 2 * model.hidden_size * model.num_layers + _activation_bytes_per_token(model) // model.num_layers


def _activation_bytes_per_token(model: ModelConfig) -> int:
    sparse, experts, expert_layer_bytes = _sparse_layers(model), model.experts, 0
    if experts is not None:
        mlp_size = experts.per_token * experts.size + (experts.shared_size or 0)
        expert_layer_bytes = MLP_BYTES * mlp_size + EXPERT_INPUT_BYTES * experts.per_token * model.hidden_size
    dense = (model.num_layers - sparse) * MLP_BYTES * model.intermediate_size
    return model.num_layers * HIDDEN_BYTES * model.hidden_size + dense + sparse * expert_layer_bytes
