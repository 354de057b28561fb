"""Which other projects read a directory differently from us, or not at all, as sentences for its owner.

docs/formats.md says which reader loads which format, and tests/model/test_readers.py checks it with those readers'
code. These notes have the essentials of that page for a directory's owner. There are four cases:

* `quant_method: fp8` with one scale per tensor has two spellings, vLLM's (`weight_scale`, `input_scale`) and that of
  transformers (`weight_scale_inv`, `activation_scale`). No file can hold both: vLLM fails on a tensor that it does not
  know. We write vLLM's, because all readers read compressed-tensors, which expresses the same.
* transformers has no reader for ModelOpt; it warns and takes the FP8 values for the weights.
* A side that 128 does not divide leaves smaller blocks at the edge. transformers divides the side by the number of
  blocks instead: 448 becomes four blocks of 112, silently, and 576 is an error. vLLM fuses q, k, v and gate, up, and
  refuses where a block would span two of them. Padding would change the shapes that config.json promises.
* vLLM has no method for experts whose weights are scaled per channel, unless their inputs are scaled per token and the
  format is compressed-tensors (seen with benchmarks/peer_programs/vllm_loads.py).
"""

from fp8serve.model.formats.interop import BLOCKED_WEIGHT, PER_TOKEN
from fp8serve.model.stored import Checkpoint

SPELLING = (
    "transformers does not find these scales: with one scale per tensor, `quant_method: fp8` is written as vLLM and "
    "SGLang read it; for transformers write the format compressed-tensors."
)
MODELOPT = (
    "transformers has no reader for modelopt and takes the FP8 numbers for the weights; use vLLM or another reader of "
    "ModelOpt's format, or write the format compressed-tensors."
)
RAGGED = (
    "{count} layers, {name} of {rows} x {cols} among them, have a side that is no multiple of {block}: fp8serve reads "
    "their blocks as they were written, vLLM refuses them, and transformers fails or reads blocks of another size "
    "without a word; for other readers choose another recipe than block."
)

EXPERTS = (
    "vLLM does not load these experts: with scales per channel it takes inputs scaled per token, in the format "
    "compressed-tensors; for vLLM write the recipe rowwise in that format, or delayed with one scale per tensor."
)


def reader_notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """One sentence for each way in which another project's reader would not get this model."""
    if checkpoint.quantization is None or not checkpoint.fp8_linears:
        return ()
    notes, producer = [], checkpoint.quantization.producer
    if producer == "modelopt":
        notes.append(MODELOPT)
    elif producer == "fp8" and str(checkpoint.scale_key(checkpoint.fp8_linears[0], "weight")).endswith("weight_scale"):
        notes.append(SPELLING)
    if ragged := [name for name in checkpoint.fp8_linears if _is_ragged(checkpoint, name)]:
        rows, cols = checkpoint.shapes[f"{ragged[0]}.weight"]
        block = BLOCKED_WEIGHT.block[1]
        notes.append(RAGGED.format(count=len(ragged), name=ragged[0], rows=rows, cols=cols, block=block))
    if any(".experts." in name and _is_unknown_to_vllm(checkpoint, name) for name in checkpoint.fp8_linears):
        notes.append(EXPERTS)
    return tuple(notes)


def _is_unknown_to_vllm(checkpoint: Checkpoint, expert: str) -> bool:
    assert checkpoint.quantization is not None
    rows = checkpoint.shapes[f"{expert}.weight"][0]
    scale = checkpoint.shards.entries[str(checkpoint.scale_key(expert, "weight"))].shape
    per_token = checkpoint.quantization.scheme_of(expert).input_spec == PER_TOKEN
    return scale in ((rows, 1), (rows,)) and not (per_token and checkpoint.quantization.producer != "modelopt")


def _is_ragged(checkpoint: Checkpoint, linear: str) -> bool:
    rows, cols = checkpoint.shapes[f"{linear}.weight"]
    scale = checkpoint.shards.entries[str(checkpoint.scale_key(linear, "weight"))].shape
    in_blocks = len(scale) > 1 and scale != (rows, 1)
    return in_blocks and not BLOCKED_WEIGHT.divides(rows, cols)
