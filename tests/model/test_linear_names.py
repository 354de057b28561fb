"""The names of layers that can have an adapter are derived from the configuration, without loading the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from fp8serve.model.building import build_on_meta, transposed_linears
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.model_config import adaptable_linear_names
from tests.compatibility.cases import make

FAMILIES = ["llama", "phi3", "apertus", "mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "glm4_moe"]
CLASSES = ["gpt_neox", "gpt2", "olmoe", "ernie4_5_moe"]
ROUTERS = (".gate", ".router", ".shared_expert_gate")
WITHOUT_TORCH = """
import json, sys
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.model_config import adaptable_linear_names
names = adaptable_linear_names(read_config(sys.argv[1]))
print(json.dumps([names, "torch" in sys.modules]))
"""


@pytest.mark.parametrize("name", [*FAMILIES, *CLASSES])
def test_adaptable_layers_are_all_linears_but_heads_routers_and_experts(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    config = read_config(tmp_path)
    model = build_on_meta(config)
    linears = [n for n, module in model.named_modules() if isinstance(module, nn.Linear)]
    left_out = {n for n in linears if ".experts." in n or n.endswith(ROUTERS)} | transposed_linears(model)
    assert sorted(adaptable_linear_names(config)) == sorted({*linears} - left_out - {model.head_name})


@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_neox", marks=pytest.mark.slow)])
def test_names_are_derived_without_importing_torch(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [adaptable_linear_names(read_config(tmp_path)), False]
