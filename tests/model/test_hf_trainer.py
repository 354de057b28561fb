"""`transformers.Trainer` and `accelerate` train a converted model as docs/training.md says; the result is served."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8serve import DelayedScaling, Engine, autocast, convert, export, scaling_state
from tests.tiny import write_tiny_model

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

RECIPE = DelayedScaling(amax_history_len=4)
ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(3, 131).view(8, 16)]


@pytest.fixture
def base(tmp_path: Path) -> Any:
    write_tiny_model(tmp_path / "base")
    return convert(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32))


@pytest.fixture
def _compiles_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Resets the environment and accelerate's state, in which `torch_compile` of TrainingArguments would persist."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def check_served(model: Any, out: Path) -> None:
    layer = model.model.layers[0].self_attn.q_proj
    assert scaling_state(layer)["input"].scale != 1, "no step updated the scales"
    export(model, out, recipe=RECIPE)
    assert len(Engine(out).generate([[5, 6, 7]], max_new_tokens=3, ignore_eos=True)[0].token_ids) == 3


@pytest.mark.usefixtures("_compiles_nothing_afterwards")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # a warning of torch's tracer
@pytest.mark.parametrize(
    ("checkpointing", "compiled"), [(False, False), (True, False), pytest.param(False, True, marks=pytest.mark.slow)]
)
def test_trainer(base: Any, tmp_path: Path, checkpointing: bool, compiled: bool) -> None:
    before = base.model.layers[0].self_attn.q_proj.weight.detach().clone()
    base.forward = autocast(recipe=RECIPE)(base.forward)
    arguments = transformers.TrainingArguments(
        str(tmp_path / "run"), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
        learning_rate=1e-3, report_to=[], use_cpu=True, activation_checkpointing=checkpointing, save_strategy="no",
        torch_compile=compiled, torch_compile_backend="aot_eager" if compiled else None,
    )  # fmt: skip
    transformers.Trainer(base, arguments, train_dataset=ROWS).train()
    assert not torch.equal(before, base.model.layers[0].self_attn.q_proj.weight)
    check_served(base, tmp_path / "out")


def test_accelerate(base: Any, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(base, optimizer, torch.utils.data.DataLoader(ROWS, batch_size=4))
    for batch in batches:
        with autocast(recipe=RECIPE):
            loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    check_served(accelerator.unwrap_model(model), tmp_path / "out")
