"""Lists why the server's log-probabilities may differ from those of training. If the list is empty, they are bitwise
equal.

On a CPU, and on a GPU in the invariant mode, server and training run the same matrix products (fp8/batch_invariant.py),
the same attention (fp8/attention.py) and the same norms, rotary embeddings and casts. All of these give a token the
same bits in every batch. Some recipes and models compute differently in server and training; `/info`, the events of a
run and `log_probs` name the reasons.
"""

from collections.abc import Iterator

import torch

from fp8serve.errors import ModelError
from fp8serve.fp8.batch_invariant import has_batch_invariant_products, use_invariant_kernels
from fp8serve.fp8.recipe import Recipe, depends_on_batch, uses_fp8_attention
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.config.rope import LongRope

BATCH_SCALE = (
    "The recipe has one scale for a whole input: training computes it from all tokens of the batch, the server from "
    'each token alone; train with granularity="row" (rowwise), or with delayed scaling.'
)
FP8_ATTENTION = "Training casts the queries and weights of attention to FP8 (fp8_dpa), and the server does not."
LONG_ROPE = (
    "LongRoPE's frequencies depend on the length: training uses that of each row, and the server uses max_model_len, "
    "which exceeds the model's original context."
)


def differences(recipe: Recipe | None, config: ModelConfig, device: str, longest: int | None = None) -> Iterator[str]:
    """Yields the reasons why a server's log-probabilities may differ from those of training under `recipe`.

    `longest` is the server's max_model_len, or None for the model's longest sequence.
    """
    if not has_batch_invariant_products(device):
        yield f"On {device} the sums in matrix products depend on the number of rows, unlike in fp8serve's CPU kernels."
    elif torch.device(device).type != "cpu" and config.experts is not None:
        yield f"On {device} the products of experts are grouped by rows."
    if depends_on_batch(recipe):
        yield BATCH_SCALE
    if uses_fp8_attention(recipe):
        yield FP8_ATTENTION
    if config.computed_by is not None:
        yield f"{config.architecture} is computed by transformers' class, which is not tested for bitwise equality."
    length = longest or config.max_length
    scalings = [rope.scaling for rope in config.layer_ropes if rope is not None]
    if any(isinstance(s, LongRope) and length > s.original_max_position_embeddings for s in scalings):
        yield LONG_ROPE


def use_invariant_mode(device: str, config: ModelConfig, uses_mx: bool) -> str:
    """Makes all sums in a model on this device independent of the number of rows, for the rest of the process.

    Returns a sentence about it. Raises ModelError if a GPU cannot compute the model so, and the errors of
    `use_invariant_kernels`.
    """
    if (reason := unsupported_in_invariant_mode(device, config, uses_mx)) is not None:
        raise ModelError(f"On {device}, invariant does not support {reason}; leave invariant out, or use a CPU.")
    use_invariant_kernels(device)
    return describe_invariant_mode(device)


def unsupported_in_invariant_mode(device: str, config: ModelConfig, uses_mx: bool) -> str | None:
    """Returns what the invariant mode does not support on this device, or None."""
    if torch.device(device).type == "cpu":
        return None
    if config.computed_by is not None:
        return f"{config.architecture}, which transformers' class computes"
    if config.experts is not None:
        return "a mixture of experts, whose products are grouped by rows"
    return "MX blocks, which torch multiplies" if uses_mx else None


def describe_invariant_mode(device: str) -> str:
    """Returns a sentence about the effects of the invariant mode on this device."""
    if torch.device(device).type == "cpu":
        return "invariant changes nothing on a CPU in one process, where no sum depends on the batch."
    return (
        f"invariant on {device}: no sum depends on the number of rows; cuBLASLt, CUTLASS and attention on warpgroups "
        "are not used, and products of more than 16 rows are slower."
    )
