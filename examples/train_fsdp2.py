"""Train on several GPUs, or CPU processes, with FSDP2: weights sharded in FP32, gathered in FP8.

A small language model learns to copy the token before the last. Every rank has its own batches. Without torchrun, the
script runs in one process; with it, in several:

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py --steps 50 --recipe delayed
"""

import argparse
import os
import sys
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard

from fp8serve import autocast, convert
from fp8serve.fp8.fsdp import gather_in_fp8
from fp8serve.fp8.recipe import from_name

VOCAB, HIDDEN = 64, 128


class Block(nn.Module):
    """Mixes each token with the two before it, then applies an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.mix = nn.Linear(3 * HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        padded = nn.functional.pad(self.norm(x), (0, 0, 2, 0))
        x = x + self.mix(torch.cat([padded[:, i : i + x.shape[1]] for i in range(3)], -1))
        y: Tensor = x + self.down(nn.functional.silu(self.up(x)))
        return y


class Network(nn.Module):
    """tokens [batch, length] -> logits [batch * length, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, HIDDEN), nn.ModuleList([Block(), Block()])
        self.norm, self.lm_head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x).flatten(0, 1))
        return logits


def sharded() -> Network:
    """Returns a model that is converted, set to gather in FP8, and sharded: each block gathers its weights when it
    runs."""
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = Network()
    gather_in_fp8(convert(model))  # all but lm_head, which stays in high precision
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    model.to(kind)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def target(tokens: Tensor) -> Tensor:
    """The token before the last, at each position; -1, which the loss ignores, at the first two."""
    return nn.functional.pad(tokens[:, :-2], (2, 0), value=-1)


def start() -> None:
    """Join the ranks that torchrun started, or be the only one."""
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def train(recipe: str, steps: int) -> list[float]:
    """The mean loss over the ranks, step by step."""
    model = sharded()
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (8, 32), generator=data).to(device)
        # delayed scales are equal on all ranks of the default process group, with one collective in each pass
        with autocast(recipe=from_name(recipe)):
            logits = model(tokens)
        loss = nn.functional.cross_entropy(logits, target(tokens).flatten(), ignore_index=-1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(float(mean))
    return losses


def leave() -> NoReturn:
    """Exit without shutting the interpreter down.

    Caches of DTensor (PyTorch 2.13) keep the mesh, and with it the threads of gloo, beyond `destroy_process_group`.
    Such a thread aborts the process ("terminate called without an active exception") when it releases its last tensor
    while the interpreter shuts down.
    """
    dist.barrier()  # no rank exits while another still communicates with it
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with FSDP2 and FP8 all-gathers.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--recipe", choices=["delayed", "current"], default="delayed")
    options = parser.parse_args()
    start()
    losses = train(options.recipe, options.steps)
    if dist.get_rank() == 0:
        print(f"{options.recipe} on {dist.get_world_size()} ranks: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    leave()


if __name__ == "__main__":
    main()
