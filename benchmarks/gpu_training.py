"""Forward and backward of two layers of a Llama 8B, 8,192 tokens: python -m benchmarks.gpu_training DEVICE OUT [NAMES]

All in one process, so that figures can be compared: BF16, torchao's float8 training, transformers' layers that
`convert` turned into FP8 ("convert ..."), and the network of a fine-tune ("trainer ..."). NAMES are names of CASES,
separated by commas; the default is all. Each row has the median time of a step, the time of the first steps, which
includes compilation, and the peak of allocated memory. A step is a forward and a backward pass; there is no optimizer.

"compiled" is torch.compile of the whole model, and for the trainer what `finetune --compile` does (train/compiled.py).
Rows of the trainer have a digest of the last output: those with the same recipe and weights must have the same digest
("unfused": casts are ops of their own; "separate": also, every layer casts its own input). "packed" has sequences of
many lengths, and "packed loop" computes their attention sequence by sequence. "norm" is the norm of 291 gradients,
"norm by rows" as it was computed before. The device "cpu" takes small sizes; it only shows that the script works.
"""

import hashlib
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import fp8serve
from fp8serve.fp8 import attention, fused
from fp8serve.fp8.recipe import Recipe, from_name
from fp8serve.model.config.model_config import ModelConfig
from fp8serve.model.config.rope import Rope
from fp8serve.model.network.decoder import Decoder, make_attend
from fp8serve.train import optimizer
from fp8serve.train.compiled import CompiledLayers
from fp8serve.train.events import ignore
from fp8serve.train.forward import Network

BF16, LAYERS, GRADIENTS = torch.bfloat16, 2, 291
CASES = (
    "bf16", "bf16 compiled", "ao tensorwise compiled", "ao rowwise compiled",
    "convert delayed", "convert delayed compiled", "convert rowwise", "convert rowwise compiled",
    "trainer bf16", "trainer bf16 compiled", "trainer delayed", "trainer delayed unfused", "trainer delayed separate",
    "trainer current", "trainer rowwise", "trainer rowwise compiled",
    "trainer block", "trainer delayed masters", "trainer delayed recompute", "trainer delayed compiled",
    "trainer delayed packed", "trainer delayed packed loop", "norm", "norm by rows",
)  # fmt: skip


class Sizes:
    """The sizes of the layers and of the batch; on a CPU they are small."""

    def __init__(self, device: str) -> None:
        is_small = device == "cpu"
        self.hidden, self.inner, self.heads, self.kv_heads = (128, 256, 4, 2) if is_small else (4096, 14336, 32, 8)
        self.sequences, self.length = (2, 32) if is_small else (2, 4096)

    @property
    def packed(self) -> list[int]:
        """Lengths from 1/64 to 1/4 of all tokens, as in a packed batch of chats."""
        tokens = self.sequences * self.length
        shares = [1 / 4, 1 / 8, 1 / 16, 3 / 16, 1 / 32, 1 / 64, 5 / 64]
        lengths = [int(share * tokens) for share in shares]
        return [*lengths, tokens - sum(lengths)]


class Llama(nn.Module):
    """Two of transformers' layers; x [sequences, length, hidden] -> the same shape."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=sizes.hidden,
            intermediate_size=sizes.inner,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            num_hidden_layers=LAYERS,
            vocab_size=1000,
            max_position_embeddings=8192,
        )
        config._attn_implementation = "sdpa"
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(LAYERS))
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        embeddings = self.rotary(x, positions)
        for layer in self.layers:
            output = layer(x, position_embeddings=embeddings, position_ids=positions)
            x = output[0] if isinstance(output, tuple) else output
        return x


class Trainer(nn.Module):
    """The layers of a fine-tune's network, without embedding and head; x [tokens, hidden] -> the same shape."""

    def __init__(self, sizes: Sizes, device: str, lengths: list[int], recompute: bool, masters: bool) -> None:
        super().__init__()
        decoder = Decoder(model_config(sizes), device, torch.float32 if masters else BF16)
        if masters:  # only linear layers read FP32; norms are cast for every microbatch
            decoder.to(BF16)
            for module in decoder.modules():
                if isinstance(module, nn.Linear):
                    module.float()
        self.network = Network(decoder, recompute=recompute)
        self.lengths = lengths
        self.positions = torch.cat([torch.arange(n) for n in lengths]).to(device)

    def forward(self, x: Tensor) -> Tensor:
        decoder, network = self.network.decoder, self.network
        options = [decoder.attention_options(layer) for layer in range(LAYERS)]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return network.attention[layer](q, k, v, self.lengths, *options[layer])  # type: ignore[no-any-return]

        rotations = decoder.position_embeddings(self.positions, x.dtype)
        for layer, rotation in zip(decoder.parts, rotations, strict=True):
            run = partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=False) if network.recompute else layer
            x = run(x, rotation, make_attend(attend))
        return x


def model_config(sizes: Sizes) -> ModelConfig:
    head_dim = sizes.hidden // sizes.heads
    return ModelConfig(
        architecture="LlamaForCausalLM", model_type="llama", vocab_size=1000, hidden_size=sizes.hidden,
        intermediate_size=sizes.inner, num_layers=LAYERS, num_heads=sizes.heads, num_kv_heads=sizes.kv_heads,
        head_dim=head_dim, rms_norm_eps=1e-5, max_position_embeddings=8192, tie_word_embeddings=False,
        attention_bias=False, attention_out_bias=False, mlp_bias=False, qk_norm=False, layer_windows=(None,) * LAYERS,
        layer_ropes=(Rope(10000.0),) * LAYERS, softmax_scale=head_dim**-0.5, bos_token_id=1, eos_token_ids=(2,),
        dtype="bfloat16",
    )  # fmt: skip


class Bench:
    """Measures cases and writes all rows after each."""

    def __init__(self, device: str, out: Path) -> None:
        self.device, self.out, self.sizes = device, out, Sizes(device)
        self.rows: list[dict[str, Any]] = []

    def run(self, name: str) -> None:
        """Measures one case. A case that fails is reported, and the others go on."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        self._reset_peak()
        try:
            row = self._norm(name) if name.startswith("norm") else self._layers(name)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        self.rows.append({"what": name, **row})
        print(json.dumps(self.rows[-1]), flush=True)
        self.out.write_text(json.dumps({"environment": environment(self.device), "rows": self.rows}, indent=1) + "\n")

    def _layers(self, name: str) -> dict[str, Any]:
        kind, *words = name.split()
        is_compiled = "compiled" in words
        if kind == "ao":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            model = self._llama()
            convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(words[0]))
            return self._measure(model, is_compiled)
        recipe = None if "bf16" in (kind, words[0] if words else "") else from_name(words[0])
        if kind != "trainer":
            model = self._llama()
        else:
            lengths = self.sizes.packed if "packed" in words else [self.sizes.length] * self.sizes.sequences
            model = Trainer(self.sizes, self.device, lengths, "recompute" in words, "masters" in words)
        if recipe is not None:
            fp8serve.convert(model)
        if "separate" in words:
            for module in model.modules():
                if isinstance(module, fp8serve.Linear):
                    module.register_forward_hook(lambda *_: None)
        with ExitStack() as stack:
            if "loop" in words:
                stack.enter_context(replaced(attention, "_can_use_flash_attention"))
            if "unfused" in words:
                stack.enter_context(replaced(fused, "_is_on_gpu"))
            return self._measure(model, is_compiled, recipe, is_flat=kind == "trainer")

    def _llama(self) -> nn.Module:
        with torch.device(self.device):  # a CPU takes long for so many random numbers
            return Llama(self.sizes).to(BF16)

    def _measure(
        self, model: nn.Module, is_compiled: bool, recipe: Recipe | None = None, is_flat: bool = False
    ) -> dict[str, Any]:
        sizes = self.sizes
        shape = (sizes.sequences * sizes.length,) if is_flat else (sizes.sequences, sizes.length)
        x = torch.randn(*shape, sizes.hidden).to(self.device, BF16).requires_grad_()
        dy = torch.randn(*shape, sizes.hidden).to(self.device, BF16) * 1e-3
        layers = CompiledLayers(model.network.decoder) if is_compiled and isinstance(model, Trainer) else None
        runner = torch.compile(model) if is_compiled and layers is None else model
        outputs: list[Tensor] = []

        def step() -> None:
            context: AbstractContextManager[Any] = nullcontext()
            if recipe is not None:
                context = fp8serve.autocast(recipe=recipe)
            with nullcontext() if layers is None else layers.running(ignore, 1):
                with context:
                    y = runner(x)
                y.backward(dy)
            outputs[:] = [y.detach()]
            for tensor in (x, *model.parameters()):
                tensor.grad = None

        times = self._times(step)
        return times | ({"digest": digest(outputs[0])} if is_flat else {})

    def _norm(self, name: str) -> dict[str, Any]:
        side = 16 if self.device == "cpu" else 1024
        grads = {str(i): torch.randn(side, side, device=self.device) for i in range(GRADIENTS)}
        compute = _norm_by_rows if "rows" in name else optimizer.global_norm
        norm = partial(compute, grads)
        return self._times(norm) | {"norm": norm()}

    def _times(self, step: Callable[[], Any]) -> dict[str, Any]:
        start = time.perf_counter()
        for _ in range(3):
            step()
        self._synchronize()
        first = time.perf_counter() - start
        times = []
        for _ in range(3 if self.device == "cpu" else 10):
            start = time.perf_counter()
            step()
            self._synchronize()
            times.append(time.perf_counter() - start)
        peak = 0.0 if self.device == "cpu" else torch.cuda.max_memory_allocated() / 2**30
        return {"ms": statistics.median(times) * 1e3, "first 3 steps s": first, "peak GiB": peak}

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _reset_peak(self) -> None:
        if self.device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _norm_by_rows(grads: dict[str, Tensor]) -> float:
    return optimizer.norm_of_rows([optimizer.row_norms(grad) for grad in grads.values()])


@contextmanager
def replaced(module: Any, name: str) -> Iterator[None]:
    """Makes the condition `name` of a module false inside the block."""
    condition = getattr(module, name)
    setattr(module, name, lambda *_: False)
    try:
        yield
    finally:
        setattr(module, name, condition)


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


def environment(device: str) -> dict[str, str]:
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    return {"device": name, "torch": torch.__version__, "fp8serve": fp8serve.__version__}


def main() -> None:
    warnings.filterwarnings("ignore")
    device, out, *rest = sys.argv[1:]
    names = rest[0].split(",") if rest else CASES
    if unknown := set(names) - set(CASES):
        raise SystemExit(f"There are no cases {sorted(unknown)}; there are {', '.join(CASES)}.")
    bench = Bench(device, Path(out))
    for name in names:
        bench.run(name)


if __name__ == "__main__":
    main()
