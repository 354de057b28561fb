"""A bidirectional transformer with learned positions: BERT and its relatives.

As in the decoder, sequences are concatenated without padding, [tokens, hidden], and names are those of Hugging Face
files (`encoder.layer.0.attention.self.query.weight`). There is no cache. Every sequence attends only to itself, and
norms and activations are computed so that a row's bits do not depend on its place. A text's vectors therefore do not
depend on other texts, if the linears' rows do not.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone uses
from torch import Tensor, nn

from fp8serve.fp8 import ops as ops  # registers the op called below
from fp8serve.model.config.encoder import EncoderActivation, EncoderConfig
from fp8serve.model.network.fusing import Projections

_look_up = torch.ops.fp8serve.look_up.default


class Embeddings(nn.Module):
    """The sum of the embeddings of a token, its position and its segment, normalised."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.first = config.first_position

    def forward(self, ids: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        x = self.word_embeddings(ids) + self.token_type_embeddings(segments)
        return self.LayerNorm(x + self.position_embeddings(positions + self.first))  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Every token of a sequence attends to all of it."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))
        self.qkv = Projections(self, "query", "key", "value")

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in self.qkv(x, None))
        parts = zip(*(torch.split(t, list(lengths)) for t in (q, k, v)), strict=True)
        return torch.cat([_attended(*part) for part in parts]).flatten(1)


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence [length, heads, head_dim]; alone, because a batch may be divided differently among threads."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)


class Added(nn.Module):
    """LayerNorm(dense(x) + residual)."""

    def __init__(self, inputs: int, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """Attend, add, normalise; MLP, add, normalise."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(config), "output": Added(config.hidden_size, config)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.intermediate_size)})
        self.output = Added(config.intermediate_size, config)
        self.activation = config.activation

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, lengths), x)
        return self.output(activated(self.intermediate["dense"](x), self.activation), x)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """`encoder(ids, lengths)` gives the last layer's vector of every token."""

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
        """The head, under the names of the files: BERT's reads the model's pooler, the others contain the same
        layer."""
        size = self.config.hidden_size
        dense, out = nn.Linear(size, size), nn.Linear(size, labels)
        if self.config.has_pooler:
            self.pooler: nn.Module = nn.ModuleDict({"dense": dense})
            self.classifier: nn.Module = out
        else:
            self.classifier = nn.ModuleDict({"dense": dense, "out_proj": out})

    def logits(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """hidden [tokens, H] of some texts -> FP32 [texts, labels], by the head. Each text is computed alone, so its
        bits do not depend on others."""
        names = (
            ("pooler.dense", "classifier") if self.config.has_pooler else ("classifier.dense", "classifier.out_proj")
        )
        dense, out = map(self.get_submodule, names)
        return torch.cat([out(torch.tanh(dense(part[:1]))).float() for part in torch.split(hidden, list(lengths))])

    def forward(self, ids: Tensor, lengths: Sequence[int], segments: Tensor | None = None) -> Tensor:
        """ids and segments integer [T], T the sum of `lengths` -> [T, hidden]. ValueError: the lengths do not add up.

        segments: the first or the second text of a pair, 0 or 1; None: all the first.
        """
        if sum(lengths) != len(ids):
            raise ValueError(f"The sequence lengths add up to {sum(lengths)}, but there are {len(ids)} tokens.")
        x = self.enter(ids, lengths, segments)
        for layer in self.parts:
            x = layer(x, lengths)
        return x

    def join(self) -> None:
        """For serving: query, key and value of each layer become one matrix where they can (fp8/joined.py)."""
        for module in self.modules():
            if isinstance(module, SelfAttention):
                module.qkv.join()

    def enter(self, ids: Tensor, lengths: Sequence[int], segments: Tensor | None = None) -> Tensor:
        """The input of the first layer."""
        positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
        return cast(Tensor, self.embeddings(ids, positions, torch.zeros_like(ids) if segments is None else segments))

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The layers, which a pass goes through one after the other."""
        return list(cast(nn.ModuleList, self.encoder["layer"]))

    def named_in(self, part: int, names: Iterable[str]) -> list[str]:
        """Those of these names of modules and tensors that belong to a layer."""
        return [name for name in names if name.startswith(f"encoder.layer.{part}.")]

    def linear_names(self) -> list[str]:
        """Names of the linears that FP8 may run, in the model's order."""
        parts = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
                 "intermediate.dense", "output.dense")  # fmt: skip
        return [f"encoder.layer.{layer}.{part}" for layer in range(self.config.num_layers) for part in parts]


def activated(x: Tensor, kind: EncoderActivation) -> Tensor:
    """GELU of x [T, N]. For BF16 on a CPU it is looked up in a table of all 65,536 values, because the vectorised
    function and the one for the rest at the end of a tensor may differ in the last bit."""
    if x.dtype is torch.bfloat16 and x.device.type == "cpu" and not x.requires_grad:
        return _look_up(x, _table(kind))  # type: ignore[no-any-return]
    return F.gelu(x, approximate=_APPROXIMATE[kind])


_APPROXIMATE: dict[EncoderActivation, str] = {"gelu": "none", "gelu_tanh": "tanh"}


@lru_cache
def _table(kind: EncoderActivation) -> Tensor:
    """BF16 [65536]: GELU of the number whose bits are the index."""
    with torch.inference_mode(False):
        return F.gelu(torch.arange(2**16).to(torch.int16).view(torch.bfloat16), approximate=_APPROXIMATE[kind])
