"""A directory's tensors in our conventions: every key is classified, checked and converted.

Every tensor in the files must be a parameter of the architecture with its shape, a known scale, or one of a few known
left-overs; every parameter must be there. Opening reads only headers, and a head that should equal the embedding.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fp8serve.errors import ModelError, ScalesError
from fp8serve.fp8 import ops
from fp8serve.fp8.spec import UNQUANTIZED, WEIGHTS, QuantSpec
from fp8serve.fp8.stateful import state_key
from fp8serve.model.building import Model, skeleton
from fp8serve.model.config.decoder import read_any_config
from fp8serve.model.config.encoder import EncoderConfig
from fp8serve.model.config.model_config import AnyConfig, ModelConfig
from fp8serve.model.config.wrappers import read_text_config, text_shards
from fp8serve.model.formats import interop
from fp8serve.model.formats.interop import Quantization, ScaleKey
from fp8serve.model.formats.microscaling import Widened, widen
from fp8serve.model.formats.scales import FILE_NAME, ScalingCheckpoint
from fp8serve.model.formats.torchao import plain_names
from fp8serve.model.formats.unstacked import unstacked
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.storage.files import present
from fp8serve.model.storage.shards import Shards, type_name

_LEFT_OVERS = ("rotary_emb.inv_freq", "attn.masked_bias", "attention.masked_bias")  # buffers of old files; recomputed
# in encoders: a buffer, and the pre-training head
_OF_ENCODERS = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.", "cls.", "lm_head.", "head.",
                "decoder.")  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
TOLERANCE = 0.01


@dataclass(frozen=True)
class StoredLinear:
    """An FP8 linear of the directory, in our conventions.

    weight_q E4M3 [N, K], a mapped view; weight_scale_inv FP32 [], [N, 1] or [ceil(N/128), ceil(K/128)], dequantizes;
    input_scale FP32 [], quantizes, or None where inputs are quantized dynamically or not at all; input_spec says which.
    """

    weight_q: Tensor
    weight_scale_inv: Tensor
    input_scale: Tensor | None
    input_spec: QuantSpec
    is_embedding: bool = False

    def weight(self) -> Tensor:
        """The weight in FP32 [N, K]."""
        return ops.dequantize(self.weight_q, self.weight_scale_inv)

    @property
    def specs(self) -> tuple[QuantSpec | None, QuantSpec]:
        """How inputs and weight are quantized; an embedding has no inputs."""
        shape = tuple(self.weight_scale_inv.shape)
        weight = next(spec for spec in WEIGHTS if spec.scale_shape(*self.weight_q.shape) == shape)
        return None if self.is_embedding else self.input_spec, weight


class Checkpoint(Mapping[str, Tensor]):
    """The model in a directory, as a mapping from parameter names to tensors in high precision.

    `checkpoint["model.norm.weight"]` is as stored, an FP8 weight is dequantized. left_out: parts of the directory's
    model that do not belong to the language model. fp8_linears: the linears that are stored in FP8, and run in it.
    fp8_matrices: other matrices that are stored in FP8 (embedding, output layer, routers), which run in high precision.
    """

    def __init__(
        self,
        path: Path,
        config: AnyConfig,
        shards: Shards,
        quantization: Quantization | None,
        left_out: tuple[str, ...] = (),
    ) -> None:
        self.path, self.any_config, self.shards, self.quantization = path, config, shards, quantization
        self.left_out = left_out
        model = skeleton(config)
        self._head = () if isinstance(model, Encoder) else _head_and_embedding(model)
        self._embeddings = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        self.linears = model.linear_names()
        self.shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        self._scales: dict[ScaleKey, str] = {}
        for key in shards:
            self._place(key)
        if missing := [name for name in self.shapes if name not in shards]:
            raise self._incomplete(missing)
        self._check_head()
        in_fp8 = dict.fromkeys(n.removesuffix(".weight") for n in self.shapes if self._is_fp8(n))
        linears = frozenset(self.linears)
        self.fp8_linears = [name for name in in_fp8 if name in linears]
        self.fp8_matrices = [name for name in in_fp8 if name not in linears]
        self.high_precision_linears = [n for n in self.linears if self.fp8_linears and n not in in_fp8]

    def _place(self, key: str) -> None:
        """Classify one key of the file; ModelError when it has no place."""
        state = state_key(key)  # of training, which `save_pretrained` of a converted model writes (converted.py)
        if state is not None and f"{state[0].rpartition('.')[0]}.weight" in self.shapes:
            return
        if key in self.shapes:
            shape = self.shards.entries[key].shape
            if shape != self.shapes[key]:
                expected = list(self.shapes[key])
                raise ModelError(f"{self.path}: {key} has the shape {list(shape)}; config.json makes it {expected}.")
            return
        scale = interop.classify(key)
        if scale is not None:
            if scale in self._scales:
                raise ModelError(f"{self.path} holds both {self._scales[scale]} and {key}, which mean the same scale.")
            self._scales[scale] = key
        elif not self._is_left_over(key):
            raise ModelError(f"{self.path} holds the tensor {key}, which {self.any_config.architecture} does not have.")

    def _incomplete(self, missing: list[str]) -> ModelError:
        """An embedding model is published without the matrix that makes logits, and with a modules.json."""
        if missing == [*self._head[:1]]:
            return ModelError(
                f"{self.path} lacks the output layer {missing[0]}: the checkpoint is incomplete or, if it is an "
                "embedding model, lacks the modules.json of sentence-transformers."
            )
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return ModelError(f"{self.path} lacks the tensor {missing[0]}{more}; the checkpoint is incomplete.")

    def _is_left_over(self, key: str) -> bool:
        config = self.any_config
        if isinstance(config, EncoderConfig):
            return key.startswith(_OF_ENCODERS)
        return key.endswith(_LEFT_OVERS) or (key == self._head[0] and config.tie_word_embeddings)

    def _check_head(self) -> None:
        """A head beside a tied embedding must equal the embedding, because some readers take the one and some the
        other."""
        config = self.any_config
        if isinstance(config, EncoderConfig) or not config.tie_word_embeddings or self._head[0] not in self.shards:
            return
        scales = [self.scale_key(name.removesuffix(".weight"), "weight") for name in self._head]
        same = self.shards.same(*self._head) and (None in scales or self.shards.same(*map(str, scales)))
        if not same:
            raise ModelError(
                f"{self.path}: {self._head[0]} differs from {self._head[1]}, to which config.json ties it; set "
                "tie_word_embeddings to false, or take the tensor out."
            )

    def _is_fp8(self, name: str) -> bool:
        dtype = self.shards.entries[name].dtype
        if dtype is torch.float8_e4m3fn:
            if ScaleKey(name.removesuffix(".weight"), "weight") not in self._scales:
                raise ModelError(f"{self.path}: {name} is FP8 but has no weight_scale.")
            if len(self.shapes[name]) != 2:
                raise ModelError(f"{self.path}: {name} is FP8 and not a matrix; store it in BF16.")
            return True
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(f"{self.path}: {name} is stored as {type_name(dtype)}, which is not supported.")
        return False

    def __getitem__(self, name: str) -> Tensor:
        """The parameter in high precision: as stored, or dequantized to FP32. KeyError when there is none."""
        if name not in self.shapes:
            raise KeyError(name)
        stored = self.stored(name.removesuffix(".weight"))
        return self.shards[name] if stored is None else stored.weight()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def config(self) -> ModelConfig:
        """The configuration of a language model. ModelError: it is an encoder."""
        if isinstance(self.any_config, EncoderConfig):
            raise ModelError(
                f"{self.path} holds {self.any_config.architecture}, an encoder: it embeds, and writes no text."
            )
        return self.any_config

    @property
    def runs_in_high_precision(self) -> bool:
        """Whether a quantized directory runs in high precision: only its cache is FP8, or matrices that are no layers,
        or its weights are in MX blocks."""
        quantization, no_layers = self.quantization, bool(self.fp8_matrices) and not self.fp8_linears
        return quantization is not None and (not quantization.groups or no_layers or isinstance(self.shards, Widened))

    @property
    def has_scales(self) -> bool:
        """Whether it is served as stored: in FP8, or by its file of scales, or in high precision."""
        return bool(self.fp8_linears) or self.runs_in_high_precision or present(self.path / FILE_NAME)

    @property
    def num_weights(self) -> int:
        """The elements of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def check_scales(self) -> None:
        """ModelError: the scales of a tensor that is stored in FP8 cannot be used. Reads all scales and no weight."""
        for name in (*self.fp8_linears, *self.fp8_matrices):
            self.stored(name)
        if isinstance(self.shards, Widened):
            self.shards.check_exponents()

    def scale_key(self, owner: str, role: interop.Role) -> str | None:
        """The tensor in the file that holds this scale."""
        return self._scales.get(ScaleKey(owner, role))

    def cache_scales(self) -> Iterator[tuple[str, str]]:
        """(owner, tensor in the file) of every scale of a KV cache, also of layers that the model does not have."""
        return ((scale.owner, key) for scale, key in self._scales.items() if scale.role in interop.KV)

    def stored(self, linear: str) -> StoredLinear | None:
        """The FP8 linear or other matrix of that name, or None when it is in high precision. ModelError: bad scales."""
        name = f"{linear}.weight"
        if name not in self.shards.entries or self.shards.entries[name].dtype is not torch.float8_e4m3fn:
            return None
        if self.quantization is None:
            raise ModelError(f"{self.path}: {name} is FP8 but config.json has no quantization_config.")
        is_embedding = linear in self._embeddings
        spec = UNQUANTIZED if is_embedding else self.quantization.scheme_of(linear).input_spec
        key = self._scales[ScaleKey(linear, "weight")]
        scale_inv = interop.weight_scale_inv(key, self.shards[key], *self.shapes[name])
        return StoredLinear(self.shards[name], scale_inv, self._input_scale(linear, spec), spec, is_embedding)

    def _input_scale(self, linear: str, spec: QuantSpec) -> Tensor | None:
        key = self.scale_key(linear, "input")
        if spec.source != "stored":
            return None
        if key is None:
            raise ModelError(f"{self.path}: {linear} has no input_scale, though its activations are static.")
        return interop.quantizing_scale(key, self.shards[key], self.shards.entries[key].note)


def _head_and_embedding(model: Model) -> tuple[str, ...]:
    """The names of the two matrices that may be tied."""
    embedding = next(name for name, module in model.named_modules() if module is model.embedding)
    return f"{model.head_name}.weight", f"{embedding}.weight"


def open_checkpoint(model_dir: Path | str) -> Checkpoint:
    """Open and check a Hugging Face directory. ModelError: see `read_config`, `open_shards`, `interop`; a missing,
    surplus or misshapen tensor."""
    path = Path(model_dir)
    config = read_any_config(path)
    quantization = interop.read_quantization(path, read_text_config(path))
    shards, left_out = text_shards(path)
    shards = plain_names(shards)
    if isinstance(config, ModelConfig):
        shards, predicting = without_predictors(shards, config)
        left_out += predicting
    shards = _by_module(shards, config)
    _check_number_of_experts(path, config, shards)
    return Checkpoint(path, config, widen(shards), quantization, left_out)


def matrices_note(checkpoint: Checkpoint, *, rewritten: bool = False) -> tuple[str, ...]:
    """A sentence for the owner of a model with FP8 matrices that are no layers; empty where there are none.

    rewritten: the model is about to be written by a command that keeps only layers in FP8.
    """
    names = checkpoint.fp8_matrices
    if not names:
        return ()
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    named = ", ".join(names[:2]) if more else " and ".join(names)
    done = "written in BF16, as they are computed; only convert and merge keep them in FP8"
    use = done if rewritten else "computed in BF16"
    return (f"{named}{more} {'is' if len(names) == 1 else 'are'} stored in FP8 and {use}.",)


def _check_number_of_experts(path: Path, config: AnyConfig, shards: Shards) -> None:
    """ModelError where config.json names far more experts than there are tensors: their network is not even built."""
    experts = config.experts if isinstance(config, ModelConfig) else None
    if experts is not None and experts.count * len(experts.layers) > len(shards):
        raise ModelError(
            f"{path}: config.json names {experts.count} experts in each of {len(experts.layers)} layers, and the files "
            f"hold only {len(shards)} tensors; config.json is wrong, or the checkpoint is incomplete."
        )


def _by_module(shards: Shards, config: AnyConfig) -> Shards:
    """The tensors under the names of their parameters."""
    if isinstance(config, EncoderConfig):
        # under the names of a model without a head
        names = {key: key.removeprefix(config.prefix) for key in shards}
        return shards.renamed(names) if any(key != name for key, name in names.items()) else shards
    shards = _with_prefix(shards)
    if config.computed_by is not None:
        from fp8serve.model.transformers_backend.files import by_module

        shards = by_module(shards, config)
    return unstacked(shards, config)


def _with_prefix(shards: Shards) -> Shards:
    """Under the names of a model with a head, if the file was saved without one (`Qwen3Model`)."""
    if "embed_tokens.weight" not in shards:
        return shards
    parts = ("embed_tokens.", "layers.", "norm.")
    return shards.renamed({key: f"model.{key}" if key.startswith(parts) else key for key in shards})


def without_predictors(shards: Shards, config: ModelConfig) -> tuple[Shards, tuple[str, ...]]:
    """(the tensors without those of the `num_predictors` layers for multi-token prediction, which DeepSeek's files have
    after the last layer, the names of the layers left out)."""
    behind = [f"model.layers.{config.num_layers + i}" for i in range(config.num_predictors)]
    layers = {_layer(key) for key in shards}
    omitted = tuple(layer for layer in behind if layer in layers)
    return (shards.renamed({key: key for key in shards if _layer(key) not in omitted}) if omitted else shards), omitted


def _layer(key: str) -> str:
    match = _LAYER.match(key)
    return "" if match is None else match.group(0)[:-1]


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
