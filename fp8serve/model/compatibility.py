"""Warnings for the owner of a quantized directory about programs that cannot load it, or load wrong weights from it.

docs/formats.md says which program loads which format, and tests/model/test_compatibility.py checks it with the
programs' own code. There are four cases:

* In `quant_method: fp8` with one scale per tensor, vLLM calls the scales `weight_scale` and `input_scale`; transformers
  calls them `weight_scale_inv` and `activation_scale`. A file cannot hold both, because vLLM fails on unknown tensors.
  fp8serve writes vLLM's names; compressed-tensors expresses the same scales, and all programs read it.
* transformers does not support ModelOpt's format; it logs a warning and uses the FP8 values without their scales. On
  weights of 4 bits it fails, because two values in a byte give them another shape.
* If 128 does not divide a dimension of a weight, the last block is smaller. transformers divides the dimension by the
  number of blocks instead: 448 silently becomes four blocks of 112, and 576 is an error. vLLM fuses q, k and v, and
  gate and up; it fails if a block would span two of them. Padding would contradict the shapes that follow from
  config.json.
* vLLM loads experts with one scale per channel only if inputs are scaled per token and the format is
  compressed-tensors (tested with benchmarks/peer_programs/vllm_loads.py).
"""

import torch

from fp8serve.fp8.spec import MXFP8
from fp8serve.model.config.model_config import is_expert
from fp8serve.model.formats.interop import BLOCKED_WEIGHT, PER_TOKEN
from fp8serve.model.stored_checkpoint import Checkpoint

SCALE_NAMES_NOTE = (
    "transformers ignores the scales in this directory, because `quant_method: fp8` with one scale per tensor uses the "
    "tensor names of vLLM and SGLang; write the format compressed-tensors for transformers."
)
MODELOPT_NOTE = (
    "transformers does not support the modelopt format and uses the FP8 values without their scales; load the "
    "directory with vLLM, or write the format compressed-tensors."
)
MODELOPT_4BIT_NOTE = (
    "transformers does not support the modelopt format and fails on weights of 4 bits; write the format "
    "compressed-tensors for transformers."
)
PARTIAL_BLOCK_NOTE = (
    "{count} layers, such as {name} with {rows} x {cols} elements, have a dimension that is no multiple of {block}. "
    "fp8serve loads their smaller last blocks, vLLM fails, and transformers fails or silently uses blocks of another "
    "size; choose another recipe than block for these programs."
)
EXPERTS_NOTE = (
    "vLLM does not load these experts: it supports scales per channel only with inputs that are scaled per token, in "
    "the format compressed-tensors; write the recipe rowwise in that format, or delayed with one scale per tensor."
)


def compatibility_notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns a sentence for each program that cannot load the directory's weights, or would load wrong ones."""
    if checkpoint.quantization is None or not checkpoint.quantized_linears:
        return ()
    notes, producer, linears = [], checkpoint.quantization.producer, checkpoint.quantized_linears
    fp8 = [name for name in linears if checkpoint.shards.entries[f"{name}.weight"].dtype is torch.float8_e4m3fn]
    if producer == "modelopt":
        notes.append(MODELOPT_NOTE if fp8 else MODELOPT_4BIT_NOTE)
    elif producer == "fp8" and str(checkpoint.scale_key(linears[0], "weight")).endswith("weight_scale"):
        notes.append(SCALE_NAMES_NOTE)
    if partial := [name for name in fp8 if _has_partial_block(checkpoint, name)]:
        rows, cols = checkpoint.shapes[f"{partial[0]}.weight"]
        block = BLOCKED_WEIGHT.block[1]
        note = PARTIAL_BLOCK_NOTE.format(count=len(partial), name=partial[0], rows=rows, cols=cols, block=block)
        notes.append(note)
    if any(is_expert(name) and _fails_in_vllm(checkpoint, name) for name in fp8):
        notes.append(EXPERTS_NOTE)
    return tuple(notes)


def _fails_in_vllm(checkpoint: Checkpoint, expert: str) -> bool:
    assert checkpoint.quantization is not None
    rows = checkpoint.shapes[f"{expert}.weight"][0]
    scale = checkpoint.shards.entries[str(checkpoint.scale_key(expert, "weight"))].shape
    per_token = checkpoint.quantization.require_scheme(expert).input_spec == PER_TOKEN
    return scale in ((rows, 1), (rows,)) and not (per_token and checkpoint.quantization.producer != "modelopt")


def _has_partial_block(checkpoint: Checkpoint, linear: str) -> bool:
    rows, cols = checkpoint.shapes[f"{linear}.weight"]
    scale = checkpoint.shards.entries[str(checkpoint.scale_key(linear, "weight"))].shape
    in_blocks = len(scale) > 1 and scale not in ((rows, 1), MXFP8.scale_shape(rows, cols))
    return in_blocks and not BLOCKED_WEIGHT.divides(rows, cols)
