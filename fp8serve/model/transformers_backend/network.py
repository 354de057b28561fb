"""A class of transformers with the interface of our decoder (decoder.py).

Modules and parameters have their names in the class, and so in files. Its linear layers may be replaced by ours, in
place. Attention returns to the caller of the pass, layer by layer, with queries and keys that are already rotated: the
rotation that is passed along with them does nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8serve.fp8.stacked import Stacked
from fp8serve.model.config.model_config import ModelConfig, TransformersClass
from fp8serve.model.network.decoder import Attend
from fp8serve.model.network.experts import mixtures
from fp8serve.model.transformers_backend.building import SERVED, answering, build
from fp8serve.model.transformers_backend.experts import in_mixtures
from fp8serve.model.transformers_backend.transposed import as_linears


class TransformersModel(nn.Module):
    """`model(token_ids, positions, attend)`, then `model.logits(hidden)`; see `Decoder`.

    Parameters are on "meta", to be replaced by a checkpoint's; buffers have the values that the class gives them.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = config
        self._class = cast(TransformersClass, config.computed_by)
        built: Any = build(self._class.config_json, SERVED, dtype)
        self.transposed = as_linears(built)  # whose weights are transposed in files
        for name, child in built.named_children():
            self.add_module(name, child)
        self.whole = (built,)  # in a tuple, because its modules are already registered
        self._base = str(built.base_model_prefix)
        self.head_name = _name_of(built, built.get_output_embeddings())
        self._embedding_name = _name_of(built, built.get_input_embeddings())
        high_precision = {self.head_name, *in_mixtures(built)}  # a router stays in high precision
        self._linears = [n for n, m in built.named_modules() if isinstance(m, nn.Linear) and n not in high_precision]

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, last: Tensor | None = None) -> Tensor:
        """See Decoder.forward. All rows are computed, and those of `last` are returned."""

        def answer(layer: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Any) -> Tensor:
            heads = cast(tuple[Tensor, Tensor, Tensor], tuple(t[0].transpose(0, 1).contiguous() for t in (q, k, v)))
            still = q.new_ones(len(token_ids), 1, q.shape[3]), q.new_zeros(len(token_ids), 1, q.shape[3])
            return attend(layer, heads, still, None)

        base: Any = self._modules[self._base]
        with answering(answer):
            hidden: Tensor = base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)[0][0]
        return hidden if last is None else hidden[last]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] -> FP32 [T, vocab]."""
        return self.narrow_logits(hidden).float()

    def narrow_logits(self, hidden: Tensor) -> Tensor:
        """The same in the weights' dtype."""
        return self.head(hidden)  # type: ignore[no-any-return]

    def attention_options(self, layer: int) -> tuple[float, int | None, float | None, Tensor | None]:
        """See Decoder.attention_options."""
        config = self.config
        return self._class.softmax_scales[layer], config.layer_windows[layer], config.attention_softcap, None

    @property
    def parts(self) -> Sequence[nn.Module]:
        """See Decoder.parts: the whole model is one part."""
        return [self]

    def enter(self, token_ids: Tensor) -> Tensor:
        """See Decoder.enter."""
        return token_ids

    def places(self, positions: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        """See Decoder.places."""
        return [positions]

    def leave(self, x: Tensor) -> Tensor:
        """See Decoder.leave."""
        return x

    def named_in(self, part: int, names: Iterable[str]) -> list[str]:
        """See Decoder.named_in."""
        return list(names)

    @property
    def head(self) -> nn.Module:
        """The linear layer that makes logits."""
        return self.get_submodule(self.head_name)

    @property
    def embedding(self) -> nn.Embedding:
        """The embedding of tokens."""
        return cast(nn.Embedding, self.get_submodule(self._embedding_name))

    def linear_names(self) -> list[str]:
        """See Decoder.linear_names."""
        return self._linears

    def pruned_names(self) -> list[str]:
        """See Decoder.pruned_names: here every layer sees all rows."""
        return []

    def tie(self) -> None:
        """See Decoder.tie."""
        if self.config.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def expect(self, longest: int) -> None:
        """See Decoder.expect: no class is served whose angles depend on it."""

    def join(self) -> None:
        """See Decoder.join: the class calls its layers one by one, but experts are stacked."""
        for experts in mixtures(self).values():
            experts.join()

    def matrices(self) -> Iterator[nn.Module | Stacked]:
        """See Decoder.matrices."""
        stacked = {name: experts for name, experts in mixtures(self).items() if experts.is_stacked}
        for experts in stacked.values():
            yield from experts.matrices()
        alone = [n for n in self._linears if not any(n.startswith(f"{block}.experts.") for block in stacked)]
        yield from (self.get_submodule(name) for name in (*alone, self.head_name))


def _name_of(model: nn.Module, target: nn.Module) -> str:
    return next(str(name) for name, module in model.named_modules() if module is target)
