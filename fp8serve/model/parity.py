"""Where a server's log-probabilities equal those of training, to the last bit, and where they do not.

On a CPU with our kernels both run the same products (fp8/batch_invariant_product.py), the same attention
(fp8/served_attention.py) and the same norms, rotations and casts, none of which lets a token's bits depend on its
batch. The exceptions are recipes and models whose own arithmetic depends on the batch: they are named here, for
`/info`, for a run's events and for `log_probs`.
"""

from collections.abc import Iterator

import torch

from fp8serve.fp8.batch_invariant_linear import has_batch_invariant_products
from fp8serve.fp8.recipe import Recipe, attends_in_fp8, depends_on_batch
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.config.rope import LongRope

BATCH_SCALE = (
    "A recipe with one scale for a whole input takes it in training from all tokens of the batch, in serving from each "
    'token alone; train with granularity="row" (rowwise), or with delayed scaling.'
)
FP8_ATTENTION = "Training rounds queries and weights of attention to FP8 (fp8_dpa), which serving does not."
LONG_ROPE = (
    "LongRoPE takes its frequencies in training from each row's length, in serving from max_model_len, which is beyond "
    "the trained context."
)


def differences(recipe: Recipe | None, config: ModelConfig, device: str, longest: int | None = None) -> Iterator[str]:
    """The reasons why a server's log-probabilities differ from those of training under `recipe`, as sentences; empty:
    they do not.

    longest: the server's max_model_len; None: the model's longest sequence.
    """
    if torch.device(device).type != "cpu" or not has_batch_invariant_products(device):
        yield f"On {device} products do not run on our CPU kernels: their sums depend on the number of rows."
    if depends_on_batch(recipe):
        yield BATCH_SCALE
    if attends_in_fp8(recipe):
        yield FP8_ATTENTION
    if config.computed_by is not None:
        yield f"{config.architecture} is computed by transformers' class, whose bits are not tested."
    if any(_outgrown(rope.scaling, longest or config.max_length) for rope in config.layer_ropes if rope is not None):
        yield LONG_ROPE


def _outgrown(scaling: object, longest: int) -> bool:
    return isinstance(scaling, LongRope) and longest > scaling.original_max_position_embeddings
