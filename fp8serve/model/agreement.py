"""Whether the scales in `scales.safetensors` are those of the FP8 tensors beside it.

A directory of ours holds every scale twice: other projects read `weight_scale`, `input_scale` and `k_scale` in the
weight files, we read the sidecar. Where the two differ, one reader would serve garbage. The directory is then refused,
because it is not known which of the two is right. Another project's file may round a scale to BF16.
"""

from collections.abc import Iterator

from fp8serve.errors import ScalesError
from fp8serve.model.formats.scales import ScalingCheckpoint
from fp8serve.model.stored import Checkpoint

TOLERANCE = 0.01


def check_agreement(checkpoint: Checkpoint, state: ScalingCheckpoint, where: str) -> None:
    """ScalesError naming the first tensor in which `state`, read from `where`, and the directory's files differ."""
    for key, problem in contradictions(checkpoint, state):
        raise ScalesError(f"{where}: {key} {problem}; write the directory again.")


def contradictions(checkpoint: Checkpoint, state: ScalingCheckpoint) -> Iterator[tuple[str, str]]:
    """(tensor of the sidecar, how it differs from the scale in the checkpoint's files)."""
    for key, entry in state.tensors.items():
        owner, _, role = key.rpartition(".")
        if role not in ("input", "weight", "k", "v"):
            continue
        name = checkpoint.scale_key(owner, role)  # type: ignore[arg-type]
        if name is None or checkpoint.shards[name].numel() != 1:
            continue
        stored = float(checkpoint.shards[name])  # dequantizes; an invalid scale is refused where it is used
        ratio = float(entry.scale) * stored
        if 0 < stored < float("inf") and not abs(ratio - 1) <= TOLERANCE:
            yield key, f"has a scale that is {ratio:.4g} times the one that {name} means"
