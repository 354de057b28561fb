"""The bidirectional transformers: BERT and RoBERTa with learned positions, and ModernBERT.

As in the decoder, sequences are concatenated without padding, [tokens, hidden], and names are those of Hugging Face
checkpoints (`encoder.layer.0.attention.self.query.weight`). There is no cache. Every sequence attends only to itself,
and norms and activations give a row the same bits at any index. A text's vectors are therefore independent of the other
texts, if the rows of the linear layers are.

ModernBERT has pre-norms, gated MLPs, rotary position, no biases, and layers with a local attention window. As in
transformers, cos and sin are rounded to the weights' dtype, and queries and keys are rotated in FP32 and rounded once.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn

from fp8serve.fp8 import ops as ops  # registers the op that is called below
from fp8serve.model.config.encoder import EncoderActivation, EncoderConfig
from fp8serve.model.network.fusion import Projections
from fp8serve.model.network.norms import make_embedding

_look_up = torch.ops.fp8serve.look_up.default


class Embeddings(nn.Module):
    """The normalized sum of the embeddings of a token, its position and its segment."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.word_embeddings = make_embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = make_embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = make_embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.first_position = config.first_position

    def forward(self, ids: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        x = self.word_embeddings(ids) + self.token_type_embeddings(segments)
        return self.LayerNorm(x + self.position_embeddings(positions + self.first_position))  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Attention of every token to all tokens of its sequence."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))
        self.qkv = Projections(self, "query", "key", "value")

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in self.qkv(x, None))
        parts = zip(*(torch.split(t, list(lengths)) for t in (q, k, v)), strict=True)
        return torch.cat([_attention(*part) for part in parts]).flatten(1)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns the attention of one sequence [length, heads, head_dim]. In a batch, its bits could depend on the
    others."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)


class ResidualOutput(nn.Module):
    """LayerNorm(dense(x) + residual), the output module of attention and of the MLP."""

    def __init__(self, inputs: int, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """One encoder layer: x = norm(x + attention(x)), then x = norm(x + MLP(x))."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        output = ResidualOutput(config.hidden_size, config)
        self.attention = nn.ModuleDict({"self": SelfAttention(config), "output": output})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.intermediate_size)})
        self.output = ResidualOutput(config.intermediate_size, config)
        self.activation = config.activation

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, lengths), x)
        return self.output(gelu(self.intermediate["dense"](x), self.activation), x)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """The model. `encoder(ids, lengths)` returns the last layer's vector of each token."""

    layer_prefix = "encoder.layer"
    linears_of_layer: tuple[str, ...] = (
        "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
        "intermediate.dense", "output.dense",
    )  # fmt: skip

    def __init__(
        self, config: EncoderConfig, device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device(device):
            self._add_layers(config)
            if config.head is not None:
                self._add_head(len(config.head.labels))
        self.to(dtype)

    def _add_layers(self, config: EncoderConfig) -> None:
        self.embeddings: nn.Module = Embeddings(config)
        layers = [EncoderLayer(config) for _ in range(config.num_layers)]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})

    def _add_head(self, labels: int) -> None:
        """Registers the classification head. BERT's head reads the model's pooler; other heads contain that layer."""
        size = self.config.hidden_size
        dense, out = nn.Linear(size, size), nn.Linear(size, labels)
        if self.config.has_pooler:
            self.pooler: nn.Module = nn.ModuleDict({"dense": dense})
            self.classifier: nn.Module = out
        else:
            self.classifier = nn.ModuleDict({"dense": dense, "out_proj": out})

    def logits(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns the head's logits, FP32 [texts, labels], for hidden [tokens, H] of texts with these `lengths`.

        Each text is computed alone, so that its bits do not depend on the other texts.
        """
        has_pooler = self.config.has_pooler
        dense = self.get_submodule("pooler.dense" if has_pooler else "classifier.dense")
        out = self.get_submodule("classifier" if has_pooler else "classifier.out_proj")
        return torch.cat([out(torch.tanh(dense(part[:1]))).float() for part in torch.split(hidden, list(lengths))])

    def forward(self, ids: Tensor, lengths: Sequence[int], segments: Tensor | None = None) -> Tensor:
        """Returns the hidden states [T, hidden] for the token ids [T] of sequences with these `lengths`.

        `segments` [T] is 0 for the first and 1 for the second text of a pair; None means 0 for all tokens. Raises
        ValueError if T is not the sum of `lengths`.
        """
        if sum(lengths) != len(ids):
            raise ValueError(f"The sequence lengths add up to {sum(lengths)}, but there are {len(ids)} tokens.")
        x = self.embed(ids, lengths, segments)
        for layer in self.parts:
            x = layer(x, lengths)
        return self.apply_final_norm(x)

    def apply_final_norm(self, x: Tensor) -> Tensor:
        """Returns the hidden states for the output of the last layer. BERT's layers end with a norm of their own."""
        return x

    def join(self) -> None:
        """Prepares for serving: joins query, key and value of each layer if possible (fp8/joined.py)."""
        for module in self.modules():
            if isinstance(module, SelfAttention):
                module.qkv.join()

    def embed(self, ids: Tensor, lengths: Sequence[int], segments: Tensor | None = None) -> Tensor:
        """Returns the input of the first layer, [T, hidden]. The arguments are those of `forward`."""
        positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
        return cast(Tensor, self.embeddings(ids, positions, torch.zeros_like(ids) if segments is None else segments))

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The layers, in order."""
        return list(cast(nn.ModuleList, self.get_submodule(self.layer_prefix)))

    def names_in_part(self, part: int, names: Iterable[str]) -> list[str]:
        """Returns the names of modules and tensors in `names` that belong to the layer with this index."""
        return [name for name in names if name.startswith(f"{self.layer_prefix}.{part}.")]

    def linear_names(self) -> list[str]:
        """Returns the names of the linears that may run in FP8, in the model's order."""
        layers = range(self.config.num_layers)
        return [f"{self.layer_prefix}.{layer}.{name}" for layer in layers for name in self.linears_of_layer]


def gelu(x: Tensor, kind: EncoderActivation) -> Tensor:
    """Returns GELU of x [T, N]. BF16 values on a CPU are looked up in a table of all 65,536 results, because PyTorch's
    vectorized code may differ in the last bit from its scalar code for the end of a tensor."""
    if x.dtype is torch.bfloat16 and x.device.type == "cpu" and not x.requires_grad:
        return _look_up(x, _table(kind))  # type: ignore[no-any-return]
    return F.gelu(x, approximate=_APPROXIMATE[kind])


_APPROXIMATE: dict[EncoderActivation, str] = {"gelu": "none", "gelu_tanh": "tanh"}


@lru_cache
def _table(kind: EncoderActivation) -> Tensor:
    """Returns BF16 [65536]: GELU of each number, indexed by the number's bits."""
    with torch.inference_mode(False):
        return F.gelu(torch.arange(2**16).to(torch.int16).view(torch.bfloat16), approximate=_APPROXIMATE[kind])


class ModernEmbeddings(nn.Module):
    """ModernBERT: the normalized embedding of a token."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tok_embeddings = make_embedding(config.vocab_size, config.hidden_size)
        self.norm = _norm(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.tok_embeddings(ids))  # type: ignore[no-any-return]


class ModernAttention(nn.Module):
    """ModernBERT: attention of every token to all tokens of its sequence, or to those within a window around it."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, config.layer_windows[layer]
        self.theta = config.layer_thetas[layer]
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.Wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        qkv = torch.split(self.Wqkv(x).view(len(x), 3, -1, self.head_dim), list(lengths))
        return self.Wo(torch.cat([self._attention(part) for part in qkv]).flatten(1))  # type: ignore[no-any-return]

    def _attention(self, qkv: Tensor) -> Tensor:
        """Returns the attention of one sequence [length, 3, heads, head_dim]."""
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in qkv.unbind(1))
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=q.device) / self.head_dim
        half = torch.arange(len(qkv), device=q.device).float()[:, None] * (1.0 / self.theta**exponents)
        angles = torch.cat((half, half), 1)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        return F.scaled_dot_product_attention(q, k, v, self._mask(len(qkv), q.device)).squeeze(0).transpose(0, 1)

    def _mask(self, length: int, device: torch.device) -> Tensor | None:
        """Returns the attention mask, bool [length, length], or None if every token attends to all tokens."""
        if self.window is None or length <= self.window + 1:
            return None
        positions = torch.arange(length, device=device)
        return (positions[:, None] - positions).abs() <= self.window


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


class ModernMLP(nn.Module):
    """ModernBERT: the gated MLP Wo(gelu(x) * gate), where Wi computes x and gate."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.Wi = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.Wi(x).chunk(2, -1)
        return self.Wo(gelu(x, self.activation) * gate)  # type: ignore[no-any-return]


class ModernLayer(nn.Module):
    """One encoder layer: x = x + attention(norm(x)), then x = x + ModernMLP(norm(x)).

    The first layer has no norm before attention, because the embedding is normalized already.
    """

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = _norm(config) if layer else nn.Identity()
        self.attn, self.mlp_norm, self.mlp = ModernAttention(config, layer), _norm(config), ModernMLP(config)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        x = x + self.attn(self.attn_norm(x), lengths)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class ModernEncoder(Encoder):
    """The ModernBERT model, with the interface of `Encoder`."""

    layer_prefix = "layers"
    linears_of_layer = ("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo")

    def _add_layers(self, config: EncoderConfig) -> None:
        self.embeddings = ModernEmbeddings(config)
        self.layers = nn.ModuleList(ModernLayer(config, layer) for layer in range(config.num_layers))
        self.final_norm = _norm(config)

    def apply_final_norm(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.final_norm(x))

    def embed(self, ids: Tensor, lengths: Sequence[int], segments: Tensor | None = None) -> Tensor:
        """Returns the input of the first layer, [T, hidden]. ModernBERT ignores `segments`."""
        return cast(Tensor, self.embeddings(ids))


def _norm(config: EncoderConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, config.layer_norm_eps, bias=False)


def encoder_class(config: EncoderConfig) -> type[Encoder]:
    return ModernEncoder if config.layer_windows else Encoder
