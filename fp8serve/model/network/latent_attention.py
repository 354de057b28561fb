"""DeepSeek's multi-head latent attention in its absorbed form, in which all heads share one small key.

In the papers' form, each head's keys and values are projections of a token's latent vector c: k = W_k c and v = W_v c.
The heads also share a few key elements with rotary position. Because q . (W_k c) = (W_k' q) . c, this module applies
W_k to the queries instead. It applies W_v to the output of attention, since W_v may follow the weighted sum of values.
All heads then share one key of kv_lora_rank + qk_rope_head_dim elements, whose latent part is also the value. The cache
holds only this key, and `attend` works as for any family with one key head.

`kv_b_proj` contains W_k and W_v. It is not a linear layer and stays in high precision: its input differs from that of
the papers' form, so a calibrated scale of that input could not be used.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fp8serve.fp8.batch_invariant import is_batch_invariant, product
from fp8serve.model.config.model_config import LatentSizes, ModelConfig
from fp8serve.model.network.fusion import OutputTransform, Projections, add_projection, forward_of
from fp8serve.model.network.norms import RMSNorm
from fp8serve.model.network.rotary import Attend, Heads, PositionEmbedding

EPS = 1e-6  # of the norms of latent vectors; `rms_norm_eps` in config.json applies only to the other norms


class AbsorbedProjection(nn.Module):
    """The weight [heads * (nope + value), rank], whose parts multiply the queries and the values of each head."""

    weight: nn.Parameter

    def __init__(self, heads: int, latent: LatentSizes) -> None:
        super().__init__()
        self.heads, self.sizes = heads, (latent.nope, latent.value)
        self.weight = nn.Parameter(torch.empty(heads * sum(self.sizes), latent.rank))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as nn.Linear

    def project_queries(self, q: Tensor) -> Tensor:
        """Maps queries [T, heads, nope] to [T, heads, rank]."""
        return multiply_per_head(q, self._parts()[0].transpose(1, 2))

    def project_outputs(self, x: Tensor) -> Tensor:
        """Maps the output of attention, [T, heads, rank], to values [T, heads, value]."""
        return multiply_per_head(x, self._parts()[1])

    def _parts(self) -> tuple[Tensor, Tensor]:
        keys, values = self.weight.view(self.heads, sum(self.sizes), -1).split_with_sizes(self.sizes, 1)
        return keys, values


def multiply_per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Returns [T, heads, N] for x [T, heads, K] and weight [heads, N, K].

    In BF16 on a CPU, the result of a row does not depend on the number of rows.
    """
    if not is_batch_invariant(x, weight):
        return torch.einsum("thk,hnk->thn", x, weight)
    heads = zip(x.unbind(1), weight.unbind(0), strict=True)
    return torch.stack([product(rows.contiguous(), w.contiguous(), None) for rows, w in heads], 1)


class CachedAttention(nn.Module):
    """Attention over keys and values that the caller's `attend` may cache. Subclasses make the heads and the output."""

    layer: int

    def forward(
        self,
        x: Tensor,
        norm: nn.Module | None,
        position: PositionEmbedding,
        attend: Attend,
        transform: OutputTransform,
        output_rows: Tensor | None = None,
    ) -> Tensor:
        """Returns x + transform(attention over norm(x)), [T, hidden], or only its rows `output_rows` [R]."""
        output = attend(self.layer, self.heads(x, norm, position), position.rotation, output_rows)
        if output_rows is not None:
            x = x[output_rows]
            if x.size(0) == 0:
                return x
        return self.add_output(x, output, transform)

    def heads(self, x: Tensor, norm: nn.Module | None, position: PositionEmbedding) -> Heads:
        """Returns the queries, keys and values of norm(x [T, hidden]), before their rotation."""
        raise NotImplementedError

    def add_output(self, x: Tensor, output: Tensor, transform: OutputTransform) -> Tensor:
        """Returns x + transform(o_proj(output)), [T, hidden], for the output of attention [T, heads, head_dim]."""
        raise NotImplementedError


class LatentAttention(CachedAttention):
    """Multi-head latent attention. The caller's `attend` computes the attention itself."""

    def __init__(self, config: ModelConfig, latent: LatentSizes, layer: int) -> None:
        super().__init__()
        self.layer, self.num_heads, self.latent = layer, config.num_heads, latent
        q_size, q_rank = config.num_heads * (latent.nope + latent.rope), latent.q_rank
        width, bias = config.hidden_size, config.attention_bias
        name = "q_proj" if q_rank is None else "q_a_proj"
        self.register_module(name, nn.Linear(width, q_rank or q_size, bias=bias and q_rank is not None))
        if q_rank is not None:
            self.q_a_layernorm = RMSNorm(q_rank, EPS)
            self.q_b_proj = nn.Linear(q_rank, q_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, latent.rank + latent.rope, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent.rank, EPS)
        self.kv_b_proj = AbsorbedProjection(config.num_heads, latent)
        self.o_proj = nn.Linear(config.num_heads * latent.value, width, bias=config.attention_out_bias)
        self.qkv = Projections(self, name, "kv_a_proj_with_mqa")

    def add_output(self, x: Tensor, output: Tensor, transform: OutputTransform) -> Tensor:
        first, second = output.chunk(2, -1)  # each half of a head starts with half of its rotated elements (rotary.py)
        half = self.latent.rope // 2
        values = self.kv_b_proj.project_outputs(torch.cat((first[..., half:], second[..., half:]), -1).to(x.dtype))
        return add_projection(x, self._modules["o_proj"], values.flatten(1), transform)  # type: ignore[arg-type]

    def matrices(self) -> Iterator[nn.Module | Projections]:
        """Yields the modules whose weights a forward pass multiplies by, except `kv_b_proj`."""
        yield from self.qkv.matrices()
        if self.latent.q_rank is not None:
            yield self.q_b_proj
        yield self.o_proj

    def heads(self, x: Tensor, norm: nn.Module | None, position: PositionEmbedding) -> Heads:
        sizes = self.latent
        q, latent_and_key = self.qkv(x, norm)
        if sizes.q_rank is not None:
            q = self.q_b_proj(forward_of(self.q_a_layernorm)(q))
        q_nope, q_rope = q.view(x.size(0), self.num_heads, -1).split_with_sizes((sizes.nope, sizes.rope), -1)
        latent, rope_key = latent_and_key.split_with_sizes((sizes.rank, sizes.rope), -1)
        query = torch.cat((q_rope, self.kv_b_proj.project_queries(q_nope)), -1)
        key = torch.cat((rope_key, forward_of(self.kv_a_layernorm)(latent.contiguous())), -1)[:, None]
        if position.order is not None:
            query, key = query.index_select(-1, position.order), key.index_select(-1, position.order)
        return query, key, key
