"""A step of GRPO with TRL's client of vLLM, on a CPU: `python -m tests.server.trl_trainer JSON` with `url`, `port` (of
the group), `model` (the directory of the initial weights) and `out` (where the new weights are saved).

vLLM itself is not installed. Its modules that TRL imports are replaced by the same protocol over gloo, so TRL's code
runs unchanged. Prints the rollouts before and after the step as JSON.
"""

import importlib
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.engine.trainer import TrainerGroup, bytes_of

PROMPTS = [list(range(20)), [5, 250, 7, 7, 9, 100, 3]]
COMPLETIONS = 4


def trainer_init(init_info: dict[str, Any]) -> Any:
    """Returns the trainer's side of a group, as vLLM's function does over NCCL."""
    assert init_info["packed"]
    group = TrainerGroup("", "vllm", init_info["master_port"])
    group.connect()
    return SimpleNamespace(broadcast=group.broadcast, group=SimpleNamespace(store=None, socket=None))


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, Tensor]], group: Any, src: int, post_iter_func: Callable[[Any], Tensor]
) -> None:
    """Broadcasts less than a gibibyte, which vLLM's function sends as one tensor."""
    assert src == 0
    group.broadcast(bytes_of({item[0]: post_iter_func(item) for item in iterator}))


def install_modules() -> None:
    """Makes TRL find vLLM."""
    contents = {
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": trainer_init},
        "vllm.distributed.weight_transfer.packed_tensor": {
            "packed_nccl_broadcast_producer": packed_nccl_broadcast_producer
        },
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
    }
    for path, names in contents.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            module = sys.modules.setdefault(name, ModuleType(name))
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
        vars(sys.modules[path]).update(names)


def log_probs(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def grpo_step(model: Any, rollouts: dict[str, Any]) -> float:
    """Updates the model so that it writes more even tokens. Returns the largest difference between the
    log-probabilities of the server and of the model."""
    prompts = [prompt for prompt in rollouts["prompt_ids"] for _ in range(COMPLETIONS)]
    rewards = torch.tensor([sum(t % 2 == 0 for t in ids) / len(ids) for ids in rollouts["completion_ids"]])
    groups = rewards.view(-1, COMPLETIONS)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    difference, loss = 0.0, torch.zeros(())
    for prompt, ids, sampled, advantage in zip(
        prompts, rollouts["completion_ids"], rollouts["logprobs"], advantages, strict=True
    ):
        current, old = log_probs(model, prompt, ids), torch.tensor(sampled)[:, 0]
        difference = max(difference, float((current - old).abs().max()))
        loss = loss - (torch.exp(current - current.detach()) * advantage).mean()
    (loss / len(prompts)).backward()
    optimizer.step()
    return difference


def main(options: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    install_modules()
    checks: Any = importlib.import_module("trl.import_utils")
    checks.is_vllm_available = lambda *args, **kwargs: True
    sys.modules["trl.generation"] = package = ModuleType("trl.generation")  # without the part that runs vLLM itself
    package.__path__ = [os.path.join(os.path.dirname(checks.__file__), "generation")]
    client = importlib.import_module("trl.generation.vllm_client").VLLMClient(
        base_url=options["url"], group_port=options["port"]
    )
    client.init_communicator(device="cuda")  # without an index, TRL leaves the device alone
    rollouts = client.generate(PROMPTS, n=COMPLETIONS, max_tokens=12, generation_kwargs={"seed": 1, "ignore_eos": True})
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16)
    difference = grpo_step(model, rollouts)
    client.update_model_params(model)
    client.reset_prefix_cache()
    model.save_pretrained(options["out"])
    after = client.generate(PROMPTS, max_tokens=12, temperature=0.0, generation_kwargs={"ignore_eos": True})
    with client.weight_update():  # the same weights again, one by one
        for name, parameter in model.named_parameters():
            client.update_named_param(name, parameter.data)
    again = client.generate(PROMPTS, max_tokens=12, temperature=0.0, generation_kwargs={"ignore_eos": True})
    client.close_communicator()
    print(json.dumps({"rollouts": rollouts, "difference": difference, "after": after, "again": again}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
