"""DeepSeek's latent attention, in the form in which all heads read one small key.

A token's keys and values are projections of one latent vector c: k = W_k c and v = W_v c in every head, and a few
elements with rotary position that the heads share. Because q . (W_k c) = (W_k' q) . c, and because the weighted sum of
values can be taken before W_v as well as after it, W_k is applied to the queries and W_v to the output of attention.
Then all heads have one key of kv_lora_rank + qk_rope_head_dim elements, whose first part is also the value. A cache
holds nothing else, and `attend` is that of any other family with one head of keys.

`kv_b_proj` holds W_k and W_v. Here it is not a linear layer and stays in high precision: its input differs from that in
the papers' form, so a scale of that input could not be used.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fp8serve.fp8.batch_invariant_product import is_batch_invariant, product
from fp8serve.model.config.latent import Latent
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.network.fusing import Ending, Projections, add_projection, direct
from fp8serve.model.network.norms import RMSNorm
from fp8serve.model.network.rotary import Attend, Heads, Placement

EPS = 1e-6  # for the norms of latent vectors, whatever the file says about the others


class Absorbed(nn.Module):
    """The weight [heads * (nope + value), rank] whose halves multiply queries and values, head by head."""

    weight: nn.Parameter

    def __init__(self, heads: int, latent: Latent) -> None:
        super().__init__()
        self.heads, self.sizes = heads, (latent.nope, latent.value)
        self.weight = nn.Parameter(torch.empty(heads * sum(self.sizes), latent.rank))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as nn.Linear

    def of_queries(self, q: Tensor) -> Tensor:
        """[T, heads, still] -> [T, heads, rank]."""
        return by_head(q, self._halves()[0].transpose(1, 2))

    def of_values(self, x: Tensor) -> Tensor:
        """[T, heads, rank] -> [T, heads, value]."""
        return by_head(x, self._halves()[1])

    def _halves(self) -> tuple[Tensor, Tensor]:
        keys, values = self.weight.view(self.heads, sum(self.sizes), -1).split_with_sizes(self.sizes, 1)
        return keys, values


def by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, heads, K], weight [heads, N, K] -> [T, heads, N]; in BF16 on a CPU no row depends on the others."""
    if not is_batch_invariant(x, weight):
        return torch.einsum("thk,hnk->thn", x, weight)
    heads = zip(x.unbind(1), weight.unbind(0), strict=True)
    return torch.stack([product(rows.contiguous(), w.contiguous(), None) for rows, w in heads], 1)


class LatentAttention(nn.Module):
    """Attention over latent vectors; `attend` does the mixing between tokens."""

    def __init__(self, config: ModelConfig, latent: Latent, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.latent = layer, config.num_heads, latent
        q_size, first = config.num_heads * (latent.nope + latent.rope), latent.q_rank
        width, bias = config.hidden_size, config.attention_bias
        name = "q_proj" if first is None else "q_a_proj"
        self.register_module(name, nn.Linear(width, first or q_size, bias=bias and first is not None))
        if first is not None:
            self.q_a_layernorm = RMSNorm(first, EPS)
            self.q_b_proj = nn.Linear(first, q_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, latent.rank + latent.rope, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent.rank, EPS)
        self.kv_b_proj = Absorbed(config.num_heads, latent)
        self.o_proj = nn.Linear(config.num_heads * latent.value, width, bias=config.attention_out_bias)
        self.qkv = Projections(self, name, "kv_a_proj_with_mqa")

    def forward(
        self,
        x: Tensor,
        norm: nn.Module | None,
        place: Placement,
        attend: Attend,
        ending: Ending,
        last: Tensor | None = None,
    ) -> Tensor:
        """See decoder.Attention."""
        mixed = attend(self.layer, self._heads(x, norm, place), place.rotation, last)
        if last is not None:
            x = x[last]
            if x.size(0) == 0:
                return x
        first, second = mixed.chunk(2, -1)  # in rotary.py's order, of which a part is rotated
        half = self.latent.rope // 2
        values = self.kv_b_proj.of_values(torch.cat((first[..., half:], second[..., half:]), -1).to(x.dtype))
        return add_projection(x, self._modules["o_proj"], values.flatten(1), ending)  # type: ignore[arg-type]

    def matrices(self) -> Iterator[nn.Module | Projections]:
        """The matrices that a step multiplies by, except `kv_b_proj`."""
        yield from self.qkv.matrices()
        if self.latent.q_rank is not None:
            yield self.q_b_proj
        yield self.o_proj

    def _heads(self, x: Tensor, norm: nn.Module | None, place: Placement) -> Heads:
        sizes = self.latent
        q, key = self.qkv(x, norm)
        if sizes.q_rank is not None:
            q = self.q_b_proj(direct(self.q_a_layernorm)(q))
        q_nope, q_rope = q.view(x.size(0), self.heads, -1).split_with_sizes((sizes.nope, sizes.rope), -1)
        latent, rope_key = key.split_with_sizes((sizes.rank, sizes.rope), -1)
        query = torch.cat((q_rope, self.kv_b_proj.of_queries(q_nope)), -1)
        shared = torch.cat((rope_key, direct(self.kv_a_layernorm)(latent.contiguous())), -1)[:, None]
        if place.order is not None:
            query, shared = query.index_select(-1, place.order), shared.index_select(-1, place.order)
        return query, shared, shared
