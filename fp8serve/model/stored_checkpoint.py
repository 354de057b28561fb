"""Opens a model directory as a mapping from parameter names to tensors, and checks that nothing is missing or unknown.

Every tensor in the files must be a parameter with the expected shape, a known scale or scaling state, or a tensor known
to be unused. Opening reads the files' headers. It reads no tensors, except the shapes of INT4 weights, and except to
compare a stored head with the embedding to which it is tied.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fp8serve.errors import IncompleteError, ModelError, ScalesError
from fp8serve.fp8.casting import QuantizedWeight
from fp8serve.fp8.spec import MXFP4, NVFP4, UNQUANTIZED, QuantSpec, weight_specs
from fp8serve.fp8.stateful import state_key
from fp8serve.model.building import Model, build_any_on_meta
from fp8serve.model.config.decoder import read_any_config
from fp8serve.model.config.encoder import EncoderConfig
from fp8serve.model.config.model_config import AnyConfig, ModelConfig
from fp8serve.model.config.wrappers import read_text_config, text_shards
from fp8serve.model.formats import interop
from fp8serve.model.formats.int4 import widen_int4
from fp8serve.model.formats.interop import Quantization, ScaleKey
from fp8serve.model.formats.microscaling import WidenedShards, dequantize_mx, with_weight_names
from fp8serve.model.formats.scales import COPY_TOLERANCE, FILE_NAME, ScalingCheckpoint
from fp8serve.model.formats.stacked_experts import split_stacked_experts
from fp8serve.model.formats.torchao import with_canonical_names
from fp8serve.model.network.encoder import Encoder
from fp8serve.model.storage.files import present
from fp8serve.model.storage.shards import Shards, open_shards, shards_in_memory, type_name

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.masked_bias", "attention.masked_bias")  # buffers in old files
# buffers and pre-training heads of encoders
_IGNORED_ENCODER_PREFIXES = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.", "cls.", "lm_head.",
                             "head.", "decoder.")  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class StoredLinear:
    """A linear layer, or another matrix, that a directory stores in FP8 or in 4 bits."""

    weight_q: Tensor  # E4M3 [N, K] or E2M1 codes uint8 [N, K / 2], a view of the mapped file
    # dequantizing scales: FP32 [], [N, 1] or [ceil(N / 128), ceil(K / 128)], or E8M0 [N, K / 32]; of E2M1 codes E8M0 or
    # E4M3 [N, K / 16]
    weight_scale_inv: Tensor
    weight_spec: QuantSpec  # how the weight is quantized
    input_scale: Tensor | None  # quantizing FP32 scale []; None if inputs are quantized dynamically or not at all
    input_spec: QuantSpec  # how inputs are quantized
    is_embedding: bool = False
    weight_global_scale: Tensor | None = None  # of NVFP4, dequantizing FP32 []
    pre_quant_scale: Tensor | None = None  # FP32 [K], by which inputs are multiplied and the weight was divided

    @property
    def quantized_weight(self) -> QuantizedWeight:
        return QuantizedWeight(self.weight_q, self.weight_scale_inv, self.weight_global_scale)

    def weight(self) -> Tensor:
        """Returns the weight dequantized to FP32 [N, K], for inputs that are not multiplied by `pre_quant_scale`."""
        weight = self.quantized_weight.dequantize()
        return weight if self.pre_quant_scale is None else weight * self.pre_quant_scale

    @property
    def specs(self) -> tuple[QuantSpec | None, QuantSpec]:
        """How inputs and weight are quantized; the first is None for an embedding."""
        return None if self.is_embedding else self.input_spec, self.weight_spec


class Checkpoint(Mapping[str, Tensor]):
    """A mapping from parameter names to the tensors of a model directory; quantized weights are dequantized to FP32.

    Attributes:
        omitted_modules: names of parts that are not loaded, such as a vision tower
        quantized_linears: names of the linear layers that are stored in FP8 or in 4 bits and run so
        quantized_matrices: names of other matrices in FP8 or in 4 bits (embedding, output layer, routers), which run in
            high precision
    """

    def __init__(
        self,
        path: Path,
        config: AnyConfig,
        shards: Shards,
        quantization: Quantization | None,
        omitted_modules: tuple[str, ...] = (),
    ) -> None:
        self.path, self.any_config, self.shards, self.quantization = path, config, shards, quantization
        self.omitted_modules = omitted_modules
        model = build_any_on_meta(config)
        self._tied_names = () if isinstance(model, Encoder) else _head_and_embedding(model)
        self._embeddings = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        self.linears = model.linear_names()
        self.shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        self.default_input_scales: Mapping[str, Tensor] = {}  # of layers whose files have none, by layer
        self._scales: dict[ScaleKey, str] = {}
        for key in shards:
            self._classify(key)
        if missing := [name for name in self.shapes if name not in shards]:
            raise self._incomplete(missing)
        self._check_head()
        quantized_names = dict.fromkeys(n.removesuffix(".weight") for n in self.shapes if self._is_quantized(n))
        linears = frozenset(self.linears)
        self._check_pre_quant_scales()
        self.quantized_linears = [name for name in quantized_names if name in linears]
        self.quantized_matrices = [name for name in quantized_names if name not in linears]
        self.high_precision_linears = [n for n in self.linears if self.quantized_linears and n not in quantized_names]

    def _classify(self, key: str) -> None:
        """Checks that a tensor of the file is a parameter, a scale or ignored; records its key if it is a scale."""
        state = state_key(key)
        if state is not None and f"{state[0].rpartition('.')[0]}.weight" in self.shapes:
            return  # a scaling state that `save_pretrained` of a model converted for FP8 training wrote
        if key in self.shapes:
            entry, expected = self.shards.entries[key], list(self.shapes[key])
            shape = entry.shape
            if entry.dtype is torch.uint8 and len(expected) == 2:  # two elements in a byte
                expected[1] //= 2
            if list(shape) != expected:
                raise ModelError(f"{self.path}: {key} has the shape {list(shape)}; config.json requires {expected}.")
            return
        scale = interop.parse_scale_key(key)
        if scale is not None:
            if scale in self._scales:
                raise ModelError(f"{self.path} holds both {self._scales[scale]} and {key}, which mean the same scale.")
            self._scales[scale] = key
        elif not self._is_ignored(key):
            raise ModelError(f"{self.path} holds the tensor {key}, which {self.any_config.architecture} does not have.")

    def _incomplete(self, missing: list[str]) -> IncompleteError:
        if missing == [*self._tied_names[:1]]:  # embedding models are published without a head, and with a modules.json
            return IncompleteError(
                f"{self.path} lacks the output layer {missing[0]}: the checkpoint is incomplete or, if it is an "
                "embedding model, lacks the modules.json of sentence-transformers."
            )
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return IncompleteError(f"{self.path} lacks the tensor {missing[0]}{more}; the checkpoint is incomplete.")

    def _is_ignored(self, key: str) -> bool:
        config = self.any_config
        if isinstance(config, EncoderConfig):
            return key.startswith(_IGNORED_ENCODER_PREFIXES)
        return key.endswith(_IGNORED_SUFFIXES) or (key == self._tied_names[0] and config.tie_word_embeddings)

    def _check_head(self) -> None:
        """Raises ModelError if a stored head differs from the embedding to which it is tied. Some programs would
        read the head and others the embedding."""
        if isinstance(self.any_config, EncoderConfig) or not self.any_config.tie_word_embeddings:
            return
        head, embedding = self._tied_names
        if head not in self.shards:
            return
        scales = [self.scale_key(name.removesuffix(".weight"), "weight") for name in self._tied_names]
        is_equal = self.shards.bits_equal(head, embedding)
        if not is_equal or not (None in scales or self.shards.bits_equal(*map(str, scales))):
            raise ModelError(
                f"{self.path}: {head} differs from {embedding}, to which config.json ties it; set tie_word_embeddings "
                "to false, or remove the tensor."
            )

    def _check_pre_quant_scales(self) -> None:
        """Raises ModelError if a layer without weights of 4 bits has factors of its input, which are not ignored."""
        for scale, key in self._scales.items():
            entry = self.shards.entries.get(f"{scale.owner}.weight")
            if scale.role == "pre_quant" and (entry is None or entry.dtype is not torch.uint8):
                raise ModelError(f"{self.path}: {key} belongs to no weight in NVFP4; write the model again.")

    def _is_quantized(self, name: str) -> bool:
        dtype = self.shards.entries[name].dtype
        is_4bit = dtype is torch.uint8 and name.endswith(".weight")
        if dtype is torch.float8_e4m3fn or is_4bit:
            kind = "packed" if is_4bit else "FP8"
            if ScaleKey(name.removesuffix(".weight"), "weight") not in self._scales:
                raise IncompleteError(f"{self.path}: {name} is {kind} but has no weight_scale.")
            if len(self.shapes[name]) != 2:
                raise ModelError(f"{self.path}: {name} is {kind} and not a matrix; store it in BF16.")
            return True
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(f"{self.path}: {name} is stored as {type_name(dtype)}, which is not supported.")
        return False

    def __getitem__(self, name: str) -> Tensor:
        """Returns the parameter in its stored dtype, or dequantized to FP32 if it is quantized."""
        if name not in self.shapes:
            raise KeyError(name)
        matrix = self.quantized_matrix(name.removesuffix(".weight"))
        return self.shards[name] if matrix is None else matrix.weight()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def config(self) -> ModelConfig:
        """The configuration of a language model. Raises ModelError if the model is an encoder."""
        if isinstance(self.any_config, EncoderConfig):
            raise ModelError(
                f"{self.path} holds {self.any_config.architecture}, an encoder, which cannot generate text."
            )
        return self.any_config

    @property
    def runs_in_high_precision(self) -> bool:
        """Whether the directory is quantized but its linear layers run in high precision.

        That is so if only the KV cache or matrices that are no linear layers are quantized, or if weights became BF16.
        It is also so for a gpt-oss that was dequantized and kept its quantization_config.
        """
        quantization = self.quantization
        if quantization is None or self.quantized_linears:
            return False
        if self.quantized_matrices or quantization.producer == "mxfp4":
            return True
        return not quantization.schemes or isinstance(self.shards, WidenedShards)

    @property
    def has_scales(self) -> bool:
        """Whether the recipe "stored" can serve the directory without a file of scales from elsewhere."""
        return bool(self.quantized_linears) or self.runs_in_high_precision or present(self.path / FILE_NAME)

    @property
    def num_weights(self) -> int:
        """The number of elements of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def check_scales(self) -> None:
        """Reads the scales of all quantized weights, and no elements. Raises ModelError if a scale is unusable."""
        self.read_quantized((*self.quantized_linears, *self.quantized_matrices))
        if isinstance(self.shards, WidenedShards):
            self.shards.check_scales()

    def scale_key(self, owner: str, role: interop.Role) -> str | None:
        """Returns the name of the tensor that holds this scale, or None."""
        return self._scales.get(ScaleKey(owner, role))

    def weight_format(self, name: str) -> str:
        """Returns the format of a quantized matrix for messages: "FP8", "MXFP4" or "NVFP4"."""
        scheme = None if self.quantization is None else self.quantization.find_scheme(name)
        return "FP8" if scheme is None or scheme.weight_4bit is None else scheme.weight_4bit.name

    def cache_scales(self) -> Iterator[tuple[str, str]]:
        """Yields (owner, tensor name) of every KV-cache scale, even of layers that the model does not have."""
        return ((scale.owner, key) for scale, key in self._scales.items() if scale.role in interop.KV)

    def quantized_matrix(self, linear: str) -> StoredLinear | None:
        """Returns the matrix of that name in FP8 or in 4 bits, or None if it is in high precision. Raises ModelError if
        its scales are missing or unusable."""
        name = f"{linear}.weight"
        dtype = self.shards.entries[name].dtype if name in self.shards.entries else None
        if dtype is torch.uint8:
            return self._4bit_matrix(linear)
        if dtype is not torch.float8_e4m3fn:
            return None
        if self.quantization is None:
            raise ModelError(f"{self.path}: {name} is FP8 but config.json has no quantization_config.")
        if (second := self.scale_key(linear, "global")) is not None:
            raise ModelError(
                f"{self.path}: {name} is FP8 and has {second}, which only NVFP4 has; write the model again."
            )
        is_embedding = linear in self._embeddings
        spec = UNQUANTIZED if is_embedding else self.quantization.require_scheme(linear).input_spec
        key = self._scales[ScaleKey(linear, "weight")]
        scale_inv = interop.to_weight_scale_inv(key, self.shards[key], *self.shapes[name])
        is_mx = scale_inv.dtype is torch.float8_e8m0fnu
        if spec.is_mx and not is_mx:
            raise ModelError(
                f"{self.path}: {key} is {type_name(self.shards[key].dtype)} {list(scale_inv.shape)}; config.json says "
                "that the layer is in MXFP8, whose scales are exponents of 8 bits."
            )
        shape = tuple(scale_inv.shape)
        weight_spec = next(s for s in weight_specs(is_mx) if s.scale_shape(*self.shapes[name]) == shape)
        input_scale = self._input_scale(linear, spec)
        return StoredLinear(self.shards[name], scale_inv, weight_spec, input_scale, spec, is_embedding)

    def _4bit_matrix(self, linear: str) -> StoredLinear:
        """Returns the matrix in MXFP4 or NVFP4. Raises ModelError if its scales are missing, unusable or contradict
        config.json."""
        name, key = f"{linear}.weight", self._scales[ScaleKey(linear, "weight")]
        scale_inv = interop.to_4bit_scale_inv(key, self.shards[key], *self.shapes[name])
        stored = MXFP4 if scale_inv.dtype is torch.float8_e8m0fnu else NVFP4
        scheme = None if self.quantization is None else self.quantization.find_scheme(linear)
        spec = None if scheme is None else scheme.weight_4bit
        if scheme is None or spec is None or spec.name != stored.name:
            declared = "no group with it" if scheme is None else scheme.weight_name
            raise ModelError(
                f"{self.path}: {name} is in {stored.name} by the type of {key}, and config.json has {declared}; "
                "correct quantization_config, or write the model again."
            )
        second = self.scale_key(linear, "global")
        if (second is None) is not spec.is_mx:
            problem = "lacks weight_global_scale" if second is None else f"has {second}, which MXFP4 does not have"
            raise ModelError(f"{self.path}: {name} is in {spec.name} and {problem}; write the model again.")
        is_embedding = linear in self._embeddings
        matrix = StoredLinear(
            self.shards[name], scale_inv, spec, None, UNQUANTIZED if is_embedding else scheme.input_spec, is_embedding
        )
        if second is not None:
            scale = interop.to_global_scale(second, self.shards[second], self.shards.entries[second].note)
            matrix = replace(matrix, weight_global_scale=scale)
        if (factors := self.scale_key(linear, "pre_quant")) is None:
            return matrix
        if not scheme.has_pre_quant_scales:
            raise ModelError(
                f"{self.path}: {linear} has {factors}, and quantization_config does not say {interop.MODELOPT_AWQ}; "
                "correct quantization_config, or write the model again."
            )
        columns = self.shapes[name][1]
        return replace(matrix, pre_quant_scale=interop.to_pre_quant_scale(factors, self.shards[factors], columns))

    def read_quantized(self, names: Iterable[str]) -> dict[str, StoredLinear]:
        """Returns `quantized_matrix` of each of these names that is not in high precision."""
        return {name: matrix for name in names if (matrix := self.quantized_matrix(name)) is not None}

    def _input_scale(self, linear: str, spec: QuantSpec) -> Tensor | None:
        key = self.scale_key(linear, "input")
        if spec.source != "stored":
            return None
        if key is None and linear in self.default_input_scales:
            return self.default_input_scales[linear]
        if key is None:
            raise ModelError(f"{self.path}: {linear} has no input_scale, which static activation quantization needs.")
        return interop.to_quantizing_scale(key, self.shards[key], self.shards.entries[key].note)


def _head_and_embedding(model: Model) -> tuple[str, ...]:
    """Returns the parameter names of the head and of the embedding, which may be tied."""
    embedding = next(name for name, module in model.named_modules() if module is model.embedding)
    return f"{model.head_name}.weight", f"{embedding}.weight"


def open_checkpoint(model_dir: Path | str) -> Checkpoint:
    """Opens and checks a Hugging Face directory.

    Raises ModelError if the configuration is unsupported, a file is damaged, or a tensor is missing, unknown or has the
    wrong shape.
    """
    return _open(Path(model_dir), Path(model_dir))


def checkpoint_of_tensors(tensors: Mapping[str, Tensor], model_dir: Path, name: str) -> Checkpoint:
    """Returns tensors in memory as a checkpoint of the model in `model_dir`, whose config.json says how they are
    quantized. `name` stands for the directory in messages.

    Raises IncompleteError if a weight is missing, and otherwise the errors of `open_checkpoint`.
    """
    return _open(model_dir, Path(name), shards_in_memory(tensors, name))


def _open(model_dir: Path, path: Path, stored: Shards | None = None) -> Checkpoint:
    """Returns the checkpoint of the tensors `stored`, by default those in the files of `model_dir`. `path` is their
    place in messages."""
    config = read_any_config(model_dir)
    quantization = interop.read_quantization(model_dir, read_text_config(model_dir))
    shards, omitted_modules = text_shards(open_shards(model_dir) if stored is None else stored, model_dir)
    shards = with_weight_names(with_canonical_names(shards))
    if isinstance(config, ModelConfig):
        shards, predictors = without_predictors(shards, config)
        omitted_modules += predictors
    shards = _with_parameter_names(shards, config)
    experts = config.experts if isinstance(config, ModelConfig) else None
    if experts is not None and experts.count * len(experts.layers) > len(shards):  # before a network is built
        raise IncompleteError(
            f"{path}: config.json names {experts.count} experts in each of {len(experts.layers)} layers, and the files "
            f"hold only {len(shards)} tensors; config.json is wrong, or the checkpoint is incomplete."
        )
    shards = dequantize_mx(shards, lambda module, is_4bit: _runs_quantized(quantization, module, is_4bit))
    shards = widen_int4(shards, lambda module: None if quantization is None else quantization.find_scheme(module))
    return Checkpoint(path, config, shards, quantization, omitted_modules)


def _runs_quantized(quantization: Quantization | None, module: str, is_4bit: bool) -> bool:
    """Returns whether config.json names the module, so that its MX weight is served as it is stored."""
    scheme = None if quantization is None else quantization.find_scheme(module)
    return scheme is not None and (scheme.weight_4bit is not None or not is_4bit)


def dropped_inputs_notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns a note if the file also has the inputs of layers in 4 bits."""
    quantization = checkpoint.quantization
    schemes = () if quantization is None else quantization.schemes
    formats = {scheme.weight_name for scheme in schemes if scheme.drops_inputs}
    if not formats:
        return ()
    option = " (--recipe nvfp4 casts them, too)" if NVFP4.name in formats else ""
    text = "The model was made for inputs of 4 bits; fp8serve reads its 4-bit weights, and inputs stay in BF16"
    return (f"{text}{option}.",)


def matrices_notes(checkpoint: Checkpoint, *, rewritten: bool = False) -> tuple[str, ...]:
    """Returns a note about quantized matrices that are no linear layers, if the model has any.

    `rewritten` is True if the caller's command is about to write the model with only linear layers quantized.
    """
    names = checkpoint.quantized_matrices
    if not names:
        return ()
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    subject = ", ".join(names[:2]) if more else " and ".join(names)
    plural = len(names) > 1
    formats = " and ".join(dict.fromkeys(map(checkpoint.weight_format, names)))
    output = f", and will be written in BF16; only convert and merge preserve {formats} here" if rewritten else ""
    return (f"{subject}{more} {'are' if plural else 'is'} stored in {formats} and computed in BF16{output}.",)


def ignored_notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns a note about FP8 layers that quantization_config ignores, if the model has any."""
    quantization, names = checkpoint.quantization, (*checkpoint.quantized_linears, *checkpoint.quantized_matrices)
    ignored = [name for name in names if quantization is not None and quantization.ignores(name)]
    if not ignored:
        return ()
    return (
        f"{len(ignored)} layers with FP8 weights, {ignored[0]} among them, are ignored by quantization_config; other "
        "programs may read these weights as BF16.",
    )


def _with_parameter_names(shards: Shards, config: AnyConfig) -> Shards:
    """Renames the tensors to the names of the network's parameters, and splits stacked experts."""
    if isinstance(config, EncoderConfig):  # our encoders have no head, so no prefix
        names = {key: key.removeprefix(config.prefix) for key in shards}
        return shards.renamed(names) if any(key != name for key, name in names.items()) else shards
    if "embed_tokens.weight" in shards:  # a file of a model without a head, such as `Qwen3Model`
        parts = ("embed_tokens.", "layers.", "norm.")
        shards = shards.renamed({key: f"model.{key}" if key.startswith(parts) else key for key in shards})
    if config.computed_by is not None:
        from fp8serve.model.transformers_backend.files import with_class_names

        shards = with_class_names(shards, config)
    return split_stacked_experts(shards, config)


def without_predictors(shards: Shards, config: ModelConfig) -> tuple[Shards, tuple[str, ...]]:
    """Returns the tensors without DeepSeek's layers for multi-token prediction, and the names of these layers."""
    predictors = [f"model.layers.{config.num_layers + i}" for i in range(config.num_predictors)]
    layers = {_layer(key) for key in shards}
    omitted = tuple(layer for layer in predictors if layer in layers)
    return (shards.renamed({key: key for key in shards if _layer(key) not in omitted}) if omitted else shards), omitted


def _layer(key: str) -> str:
    match = _LAYER.match(key)
    return "" if match is None else match.group(0)[:-1]


def check_agreement(checkpoint: Checkpoint, state: ScalingCheckpoint, where: str) -> None:
    """Raises ScalesError if a scale in `state`, which was read from `where`, differs from the checkpoint's scale."""
    for key, problem in find_contradictions(checkpoint, state):
        raise ScalesError(f"{where}: {key} {problem}; write the directory again.")


def find_contradictions(checkpoint: Checkpoint, state: ScalingCheckpoint) -> Iterator[tuple[str, str]]:
    """Yields (tensor in `state`, description of the difference) for scales that differ from the checkpoint's."""
    for key, entry in state.tensors.items():
        owner, _, role = key.rpartition(".")
        if role not in ("input", "weight", "k", "v"):
            continue
        name = checkpoint.scale_key(owner, role)  # type: ignore[arg-type]
        if name is None or checkpoint.shards[name].numel() != 1:
            continue
        file_scale = float(checkpoint.shards[name])  # a dequantizing scale; an invalid one is refused where it is used
        ratio = float(entry.scale) * file_scale
        if 0 < file_scale < float("inf") and not abs(ratio - 1) <= COPY_TOLERANCE:
            yield key, f"has a scale that is {ratio:.4g} times the scale of {name} in the weight files"
