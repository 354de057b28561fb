"""Processor time of a decoder layer on each of several CPU processes that divide it, with sums over the ranks and with
`invariant`, whose bits do not depend on the number of ranks.

    python benchmarks/tensor_parallel.py [--ranks 2] [--rounds 15] [--sizes HIDDEN,MLP ...]

The layers have the shapes of a Llama, FP8 weights that are packed as in a server, and stored scales. Each rank has one
thread; gloo connects the ranks over the loopback interface. Times are medians over rounds, in which the modes take
turns, and means over the ranks. They are processor times, with those of gloo's threads: other processes on the machine
change them little.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from fp8serve.engine.loading import prepare_for_serving
from fp8serve.engine.packing import Packer, modules_to_pack
from fp8serve.fp8.attention import causal_attention
from fp8serve.fp8.frozen import FrozenLinear
from fp8serve.fp8.recipe import DelayedScaling
from fp8serve.fp8.sharded import Shard
from fp8serve.model.config.decoder import read_config
from fp8serve.model.network.decoder import Decoder, make_attend
from fp8serve.model.network.sharding import shard_decoder

SIZES = ["1024,2816", "2048,5632"]
TOKENS = (1, 16, 128)
MODES = {"one process": None, "sums over ranks": False, "invariant": True}  # the option invariant
NUM_LAYERS = 2


def random_decoder(folder: Path, hidden: int, intermediate: int) -> Decoder:
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256}
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": NUM_LAYERS}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, **sizes, **heads}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = Decoder(read_config(folder))
    for name in model.linear_names():
        parent, _, leaf = name.rpartition(".")
        linear, scales = model.get_submodule(name), (torch.tensor(64.0), torch.tensor(2048.0))
        frozen = FrozenLinear.from_linear(linear, DelayedScaling(), *scales)  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), leaf, frozen)
    return model


@torch.inference_mode()
def run_layers(model: Decoder, tokens: int) -> None:
    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, [len(q)], *model.attention_options(layer))

    x, attend = torch.ones(tokens, model.config.hidden_size, dtype=torch.bfloat16), make_attend(attention)
    positions = model.position_embeddings(torch.arange(tokens), x.dtype)
    for layer, position in zip(model.parts, positions, strict=True):
        x = layer(x, position, attend)


def milliseconds(model: Decoder, tokens: int) -> float:
    """Returns the processor time of a layer in a round of about 40 ms or more."""
    repeats = max(2, 64 // tokens)
    start = time.process_time()
    for _ in range(repeats):
        run_layers(model, tokens)
    return (time.process_time() - start) * 1000 / repeats / NUM_LAYERS


def measure(
    rank: int, ranks: int, rounds: int, sizes: Sequence[str], folder: Path
) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yields a size, a number of tokens, and the milliseconds of each mode on this rank."""
    for size in sizes:
        models = {}
        for mode, invariant in MODES.items():
            models[mode] = model = random_decoder(folder, *map(int, size.split(",")))
            if invariant is not None:
                shard_decoder(model, Shard(rank, ranks), invariant=invariant)
            prepare_for_serving(model, "cpu")
            Packer(modules_to_pack(model)).pack()
        for tokens in TOKENS:
            times: dict[str, list[float]] = {mode: [] for mode in MODES}
            for _ in range(rounds + 1):
                for mode, model in models.items():
                    dist.barrier()
                    times[mode].append(milliseconds(model, tokens))
            yield size, tokens, {mode: statistics.median(values[1:]) for mode, values in times.items()}


def run(rank: int, ranks: int, rounds: int, sizes: Sequence[str], folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, timedelta(minutes=30), world_size=ranks, rank=rank)
    own = Path(folder) / str(rank)
    own.mkdir()
    if rank == 0:
        print(f"processor time of a layer on each of {ranks} ranks, ms; in brackets, one process that does all")
        print("| hidden and MLP size | tokens | sums over ranks | invariant | | |\n|---|---|---|---|---|---|")
    for size, tokens, times in measure(rank, ranks, rounds, sizes, own):
        means = {}
        for mode, value in times.items():
            total = torch.tensor(value)
            dist.all_reduce(total)
            means[mode] = float(total) / ranks
        one, reduced, gathered = means.values()
        cells = [size.replace(",", ", "), str(tokens), f"{reduced:.3g}", f"{gathered:.3g}"]
        cells += [f"{gathered / reduced - 1:+.0%}", f"({one:.3g})"]
        if rank == 0:
            print(f"| {' | '.join(cells)} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    sizes = "a rank needs at least 256 elements of the hidden state, one head of keys"
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="HIDDEN,MLP", help=sizes)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (arguments.ranks, arguments.rounds, arguments.sizes, folder), arguments.ranks)


if __name__ == "__main__":
    main()
