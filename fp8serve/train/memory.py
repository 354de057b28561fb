"""The memory that a fine-tune takes, from the sizes in config.json alone: no weight is loaded, and no torch.

The matrices of every family are counted: attention, latent or not, dense MLPs and experts. Biases are not, nor are the
masks and buffers of a model that transformers computes.
"""

from fp8serve.errors import JobError
from fp8serve.fp8.recipe import why_not_gathered
from fp8serve.model.config.mixture import Experts
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.train.config import TrainConfig

HIDDEN_BYTES, MIDDLE_BYTES = (
    30,
    14,
)  # that a layer keeps for the backward pass, per hidden and per MLP element of a token
LOGITS_AT_ONCE = 1 << 20  # elements that are widened to FP32 together (forward.py)
SENT_BYTES = 8  # per hidden element of a token, for each of the experts that it is sent to


def memory_estimate(
    model: ModelConfig, config: TrainConfig, tokens: int, fraction: float, processes: int = 1
) -> dict[str, int]:
    """Bytes of each of the `processes` by part for microbatches of `tokens` tokens of which `fraction` carry loss, and
    "total", the peak.

    weights: masters and moments, including every expert's; with masters in the optimizer, the BF16 model, too.
    gradients: FP32; with masters in the optimizer, BF16 and FP32. casts: FP8 weights, and BF16 casts of the others,
    while a step runs. activations: what layers keep for the backward pass; of experts, only those that a token is sent
    to. logits: BF16 with their gradient, for tokens that carry loss, and FP32 for a piece of them at a time. engine, if
    answers are written first (grpo): weights and cache of the engine that writes them; `tokens` are the prompts' then.

    In the backward pass activations are freed while gradients are made, so the peak holds the larger of the two. If
    gradients accumulate, those of earlier microbatches are there from the start, and the peak holds both. With `fsdp`
    each process has its part of weights, moments and summed gradients, and gathers a layer at a time; casts are then
    what is gathered, and the FP8 weights that are kept for the backward pass.
    """
    if config.method == "grpo":
        answers = config.batch_size * config.num_generations * config.longest_answer
        tokens = config.num_generations * tokens + answers
        fraction = answers / tokens
    if config.lora_rank is not None:
        return _of_adapter(model, config, tokens, fraction)
    linears, others = parameter_counts(model)
    every, in_model = linears + others, config.master_weights == "model"
    if config.fsdp and processes > 1:
        return _of_shards(model, config, tokens, fraction, processes)
    recipe, once = config.fp8_recipe, _has_one_cast(config)
    parts = {
        "weights": every * (4 if in_model else 6) + _moments(config, every - _norms(model), _norms(model)),
        "gradients": every * (4 if in_model else 6),
        "casts": 2 * others + linears * (1 if once else 2),
        "activations": tokens * _bytes_per_token(model, config),
        "logits": _of_logits(int(tokens * fraction) * model.vocab_size),
    }
    if config.method == "grpo":
        parts["engine"] = linears * (2 if recipe is None else 1) + 2 * others + 4 * tokens * _cached(model)
    passing = parts["activations"] + parts["logits"]
    both = max(parts["gradients"], passing) if config.accumulate == 1 else parts["gradients"] + passing
    return {**parts, "total": parts["weights"] + parts["casts"] + parts.get("engine", 0) + both}


def _has_one_cast(config: TrainConfig) -> bool:
    """Whether the FP8 data of a weight serve both directions."""
    recipe = config.fp8_recipe
    return recipe is not None and recipe.specs.linear["weight"].serves_both_directions


def _of_shards(model: ModelConfig, config: TrainConfig, tokens: int, fraction: float, processes: int) -> dict[str, int]:
    """gradients: the sums, and those of the largest unit, its own and all parts that others send; casts: a layer as it
    is gathered, twice, because the next one is fetched early, and what is around the layers in BF16."""
    linears, rest = parameter_counts(model)
    every, layer = linears + rest, linears // model.num_layers
    own = 4 * every + _moments(config, every - _norms(model), _norms(model))
    in_fp8 = why_not_gathered(config.fp8_recipe) is None
    element = 1 if in_fp8 else 2 if config.fp8_recipe is None or config.master_weights == "optimizer" else 4
    cast = 0 if config.fp8_recipe is None else linears * (1 if _has_one_cast(config) else 2)
    retained = cast // processes if in_fp8 else cast // model.num_layers if config.recompute else cast
    parts = {
        "weights": own // processes,
        "gradients": 4 * every // processes + 8 * max(layer, rest),
        "casts": 2 * rest + 2 * element * layer + retained,
        "activations": tokens * _bytes_per_token(model, config),
        "logits": _of_logits(int(tokens * fraction) * model.vocab_size),
    }
    return {**parts, "total": sum(parts.values())}


def _of_logits(elements: int) -> int:
    return 4 * elements + 8 * min(elements, LOGITS_AT_ONCE)


def _moments(config: TrainConfig, in_matrices: int, others: int) -> int:
    """Bytes of both moments of so many parameters."""
    return (2 * in_matrices + in_matrices // 32 if config.optimizer_states == "8bit" else 8 * in_matrices) + 8 * others


def check_layers(config: TrainConfig, model: ModelConfig) -> None:
    """JobError for a model that transformers computes: it is a single piece here, so nothing would be saved."""
    for name in ("recompute", "fsdp"):
        if getattr(config, name) and model.computed_by is not None:
            what = "works layer by layer, but transformers computes this model as a whole"
            raise JobError(f"{name} {what}; leave it out.")


def _cached(model: ModelConfig) -> int:
    """The number of elements of a token's keys in all layers; its values have as many."""
    return model.num_layers * model.num_kv_heads * model.head_dim


def _of_adapter(model: ModelConfig, config: TrainConfig, tokens: int, fraction: float) -> dict[str, int]:
    """The parts for an adapter. weights: the base as it is served, with an adapter at every projection and its
    moments."""
    linears, others = parameter_counts(model)
    sides, rank = _sides(model), config.lora_rank or 0
    adapter = rank * sides + (sides // 2 if config.dora else 0)  # about half of the sides are outputs
    trained = 4 * adapter + _moments(config, adapter, 0)
    parts = {
        "weights": linears * (2 if config.recipe == "bf16" else 1) + 2 * others + trained,
        "gradients": 4 * adapter,
        "casts": model.hidden_size * model.intermediate_size,  # the transpose of the largest weight
        "activations": tokens
        * (_bytes_per_token(model, config) + 2 * rank * 7 * (1 if config.recompute else model.num_layers)),
        "logits": _of_logits(int(tokens * fraction) * model.vocab_size),
    }
    return {**parts, "total": sum(parts.values())}


def _sides(model: ModelConfig) -> int:
    """Inputs and outputs of all projections that can have an adapter, added up: not those of routed experts."""
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
    """(weights of the projections that FP8 may run, all other parameters but biases)."""
    sparse, experts = _sparse_layers(model), model.experts
    attention, absorbed = _attention(model)
    linears = model.num_layers * attention + (model.num_layers - sparse) * _dense(model)
    others = model.num_layers * absorbed
    if experts is not None:
        shared = experts.shared_size or 0
        linears += sparse * (experts.count * _gated(model, experts.size) + _gated(model, shared))
        gates = experts.count + (1 if experts.names.shared_gate is not None else 0)
        others += sparse * gates * model.hidden_size
    heads = 1 if model.tie_word_embeddings else 2
    return linears, others + heads * model.vocab_size * model.hidden_size + _norms(model)


def _attention(model: ModelConfig) -> tuple[int, int]:
    """Of one layer: weights of linears, and the weight that latent attention applies head by head, which is no
    linear."""
    width, latent = model.hidden_size, model.latent
    if latent is None:
        return width * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads), 0
    query = model.num_heads * (latent.nope + latent.rope)
    queries = width * query if latent.q_rank is None else latent.q_rank * (width + query)
    around = width * (latent.rank + latent.rope) + model.num_heads * latent.value * width
    return queries + around, model.num_heads * (latent.nope + latent.value) * latent.rank


def _gated(model: ModelConfig, size: int) -> int:
    return 3 * model.hidden_size * size


def _dense(model: ModelConfig) -> int:
    return (2 if model.activation == "xielu" else 3) * model.hidden_size * model.intermediate_size


def _norms(model: ModelConfig) -> int:
    """Two norms of each layer and a last one; some families have more, which are as small."""
    latent = 0 if model.latent is None else model.latent.rank + (model.latent.q_rank or 0)
    return (2 * model.num_layers + 1) * model.hidden_size + model.num_layers * latent


def _sparse_layers(model: ModelConfig) -> int:
    return 0 if model.experts is None else len(model.experts.layers)


def _bytes_per_token(model: ModelConfig, config: TrainConfig) -> int:
    """Bytes of a token at the peak: of all layers, or of their inputs and the one layer that is computed again."""
    if not config.recompute:
        return _activations(model)
    return 2 * model.hidden_size * model.num_layers + _activations(model) // model.num_layers


def _activations(model: ModelConfig) -> int:
    """Bytes of a token in all layers."""
    sparse = _sparse_layers(model)
    of_experts = 0 if model.experts is None else sparse * _in_experts(model, model.experts)
    dense = (model.num_layers - sparse) * MIDDLE_BYTES * model.intermediate_size
    return model.num_layers * HIDDEN_BYTES * model.hidden_size + dense + of_experts


def _in_experts(model: ModelConfig, experts: Experts) -> int:
    """Of one layer."""
    middle = experts.per_token * experts.size + (experts.shared_size or 0)
    return MIDDLE_BYTES * middle + SENT_BYTES * experts.per_token * model.hidden_size
