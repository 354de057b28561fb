"""Packages that our processes must not import at their start."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fp8serve.model.config.decoder import parse_config
from tests.model.oracle import SIZES
from tests.tiny import write_tiny_model

MODULES = ("fp8serve.engine.worker", "fp8serve.train.trainer", "fp8serve.calibration.pipeline")


def test_no_compiler_and_no_transformers_is_imported() -> None:
    """One process imports the modules one after the other: none of them may import any of these packages."""
    unwanted = ("torch._dynamo", "torch._inductor", "sympy", "transformers")
    code = f"""
import importlib, sys
for module in {MODULES}:
    importlib.import_module(module)
    print(module, *[m for m in {unwanted} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*MODULES]


def test_no_compiler_is_imported_to_run_a_model(tmp_path: Path) -> None:
    """One process generates, then calibrates, and then trains."""
    code = """
import sys
from pathlib import Path
from fp8serve.calibration.pipeline import calibrate
from fp8serve.engine.engine import Engine
from fp8serve.train.config import TrainConfig
from fp8serve.train.trainer import Trainer
Engine(sys.argv[1], recipe="current").generate([[1, 2, 3]], max_new_tokens=2)
print("engine", *[m for m in ("torch._dynamo", "torch._inductor", "sympy") if m in sys.modules])
calibrate(sys.argv[1], out=sys.argv[2], samples=2, seq_len=8)
print("calibration", *[m for m in ("torch._dynamo", "torch._inductor", "sympy") if m in sys.modules])
data = Path(sys.argv[2], "data.jsonl")
data.write_text('{"text": "one two three four"}')
options = {"model": sys.argv[1], "data": [str(data)], "out": sys.argv[2] + "/run", "seq_len": 8, "max_steps": 1}
Trainer(TrainConfig.from_dict(options)).run()
print("training", *[m for m in ("torch._dynamo", "torch._inductor", "sympy") if m in sys.modules])
"""
    model = write_tiny_model(tmp_path / "model")
    arguments = [sys.executable, "-c", code, str(model), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert {"engine", "calibration", "training"} <= {*done.stdout.splitlines()}


def without_torch(code: str, *arguments: str) -> Any:
    """Runs `code` in a process that must not import torch; returns the JSON that it prints."""
    code = f"import json, sys\n{code}\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


WINDOWS = {"model_type": "exaone4", **SIZES, "pad_token_id": 2, "sliding_window": 8, "layer_types": None}


def test_a_process_without_torch_gets_a_transformers_config_from_a_child() -> None:
    code = """
from dataclasses import asdict
from fp8serve.model.config.decoder import parse_config
config = parse_config(json.loads(sys.argv[1]))
hash(config)
print(json.dumps(repr(config)))
"""
    assert without_torch(code, json.dumps(WINDOWS)) == repr(parse_config(WINDOWS))


def test_the_childs_error_message_is_raised_unchanged() -> None:
    code = """
from fp8serve.errors import ModelError
from fp8serve.model.config.decoder import parse_config
try:
    parse_config(json.loads(sys.argv[1]), where="here")
except ModelError as error:
    print(json.dumps(str(error)))
"""
    message = without_torch(code, json.dumps({"model_type": "granitemoe", **SIZES}))
    assert message.startswith("'granitemoe' is a mixture of experts")


def test_the_front_end_accepts_a_job_for_a_transformers_model_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WINDOWS))
    code = """
from pathlib import Path
import fp8serve.server.app
from fp8serve.server.faults import Fault
from fp8serve.server.finetuning.submission import Submissions
from fp8serve.server.schemas.finetune_bodies import FinetuneBody
from fp8serve.server.serving.served_weights import WeightSource
from fp8serve.server.settings import Settings
model, out = Path(sys.argv[1]), Path(sys.argv[1]) / "job"
settings = Settings(model=model)
submissions, source = Submissions(settings, *[None] * 6), WeightSource("base", "mine", model, settings)
config = submissions.fill_directory(out, FinetuneBody(data=[{"text": "a"}]), source, None)
try:
    submissions.fill_directory(model / "long", FinetuneBody(data=[{"text": "a"}], seq_len=257), source, None)
except Fault as fault:
    print(json.dumps([config.seq_len, fault.message]))
"""
    seq_len, refusal = without_torch(code, str(tmp_path))
    assert seq_len == SIZES["max_position_embeddings"]
    assert refusal.startswith("seq_len 257 is longer than the 256 tokens")
