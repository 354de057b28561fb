"""The bodies with which a trainer sends weights and pauses generation: the fields of vLLM and of SGLang that their
clients send.

Tensors do not pass through HTTP. A body says which tensors are about to arrive: their names, types and shapes.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fp8serve.server.schemas.bodies import Body, Strict

Names = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(min_length=1, fail_fast=True)]
Dtypes = Annotated[list[Annotated[str, Field(max_length=32)]], Field(fail_fast=True)]
Shapes = Annotated[
    list[Annotated[list[Annotated[int, Field(ge=0, lt=2**40)]], Field(max_length=8)]], Field(fail_fast=True)
]
Host = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9.:_\-]+$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Rank = Annotated[int, Field(ge=1, le=65536)]
GroupName = Annotated[str, Field(min_length=1, max_length=128)]
Backend = Literal["gloo", "nccl"]
Label = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="The version in `weight_version`; default: a digest.")
]
TensorInfos = list[tuple[str, str, list[int]]]


class _Tensors(Strict):
    """Tensors that are about to arrive, in this order."""

    names: Names
    shapes: Shapes

    def _infos(self, dtypes: list[str]) -> TensorInfos:
        dtypes = [dtype.removeprefix("torch.") for dtype in dtypes]
        return list(zip(self.names, dtypes, self.shapes, strict=True))

    def _check_lengths(self, dtypes: list[str], name: str) -> None:
        if not len(self.names) == len(dtypes) == len(self.shapes):
            raise PydanticCustomError("lengths", "names, {name} and shapes must have the same length", {"name": name})


class Packing(Strict):
    """Whether tensors are broadcast as the bytes of several, which exceed `packed_buffer_size_bytes` together."""

    packed: bool = False
    packed_buffer_size_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    packed_num_buffers: Annotated[int, Field(ge=1, description="Of the sender; the receiver needs one.")] = 2

    @property
    def packed_bytes(self) -> int | None:
        return self.packed_buffer_size_bytes if self.packed else None


class GroupInfo(Packing):
    """vLLM's description of a process group. The trainer is rank 0 and opens the port; the server connects to it.
    `packed` is the default of all updates."""

    master_address: Host
    master_port: Port
    rank_offset: Annotated[Rank, Field(description="The rank of this server.")]
    world_size: Annotated[Rank, Field(description="The number of processes, the trainer included.")]
    backend: Annotated[Backend | None, Field(description="Default: nccl on a GPU, gloo on a CPU.")] = None


class InitTransferBody(Body):
    """The body of `POST /init_weight_transfer_engine`, vLLM's route."""

    init_info: GroupInfo


class UpdateInfo(_Tensors, Packing):
    """vLLM's description of tensors. With `shared_memory` they are read from a POSIX shared memory of that name, which
    holds their bytes one after the other."""

    dtype_names: Dtypes
    shared_memory: Annotated[str | None, Field(min_length=1, max_length=255)] = None

    @model_validator(mode="after")
    def _lists_agree(self) -> Self:
        self._check_lengths(self.dtype_names, "dtype_names")
        if self.packed and self.shared_memory is not None:
            raise PydanticCustomError("packed", "give either packed or shared_memory")
        return self

    @property
    def infos(self) -> TensorInfos:
        return self._infos(self.dtype_names)


class UpdateWeightsBody(Body):
    """The body of `POST /update_weights`, vLLM's route."""

    update_info: UpdateInfo
    weight_version: Label | None = None


class StartUpdateBody(Body):
    """The body of `POST /start_weight_update`, vLLM's route."""

    is_checkpoint_format: Literal[True] = True


class FinishUpdateBody(Body):
    """The body of `POST /finish_weight_update`, vLLM's route."""

    weight_version: Label | None = None


class InitGroupBody(Body):
    """The body of `POST /init_weights_update_group`, SGLang's route. The trainer is rank 0 and opens the port; the
    server connects to it."""

    master_address: Host
    master_port: Port
    rank_offset: Annotated[Rank, Field(description="The rank of this server.")]
    world_size: Annotated[Rank, Field(description="The number of processes, the trainer included.")]
    group_name: GroupName = "weight_update_group"
    backend: Backend = "nccl"


class DestroyGroupBody(Body):
    """The body of `POST /destroy_weights_update_group`, SGLang's route."""

    group_name: GroupName = "weight_update_group"


class DistributedUpdateBody(Body, _Tensors):
    """The body of `POST /update_weights_from_distributed`, SGLang's route. New weights always empty the prefix cache,
    whatever `flush_cache` says. With `load_format`, all tensors are one broadcast of their bytes."""

    dtypes: Dtypes
    group_name: GroupName = "weight_update_group"
    load_format: Literal["flattened_bucket"] | None = None
    weight_version: Label | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    torch_empty_cache: bool = False

    @model_validator(mode="after")
    def _lists_agree(self) -> Self:
        self._check_lengths(self.dtypes, "dtypes")
        return self

    @property
    def infos(self) -> TensorInfos:
        return self._infos(self.dtypes)


class PauseGenerationBody(Body):
    """The body of `POST /pause_generation`, SGLang's route. `abort` ends requests in flight with what they have
    generated. With `retract` and `in_place` they continue afterwards."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGenerationBody(Body):
    """The body of `POST /continue_generation`, SGLang's route."""

    torch_empty_cache: bool = True
