"""A mixture of experts on this CPU: our engine in FP8 beside transformers and llama.cpp, in one run of peers.py.

    python benchmarks/experts.py make DIR [--experts 64] [--layers 8] [--hidden 1024]
    python benchmarks/experts.py run DIR --python /envs/hf/bin/python [--recipe rowwise] [--rounds 3] [--out benchmarks]

`make` writes DIR/model, a Qwen3-MoE with random weights in BF16, and DIR/model.gguf, the same for llama.cpp (by the
package `gguf`). `run` writes DIR/peers.toml and measures. PYTHON is the interpreter of an environment with
`transformers` and `llama-cpp-python`. Peers: transformers in BF16; llama.cpp in BF16 and, of the same bytes as ours, in
Q8_0: as it chooses to run it, and with its weights as they lie in the file ("plain"), for with AMX and more than one
token llama-cpp-python 0.3.36 crashes on experts in Q8_0. All decode greedily behind random prompts of 256 tokens;
llama.cpp at batch 1 only.

    python benchmarks/experts.py transformers DIR/model BATCH
    python benchmarks/experts.py llama DIR/model.gguf BF16|Q8_0 [plain]

are the peers, and print {"prefill": tokens/s, "decode": tokens/s}.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, NEW = 256, 64
TEXTS = ["The router sends every token to a few experts.", "A weight of eight bits is read in half the time."]


# --- make


def make(folder: Path, experts: int, layers: int, hidden: int) -> None:
    """DIR/model and DIR/model.gguf."""
    from safetensors.torch import save_file

    from fp8serve.model.storage.files import write_json
    from fp8serve.train.scratch import END, random_weights, train_tokenizer

    model = folder / "model"
    model.mkdir(parents=True)
    tokenizer = train_tokenizer(TEXTS, 512)
    tokenizer.save(str(model / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32000, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "moe_intermediate_size": hidden // 2, "num_experts": experts,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "bos_token_id": end, "eos_token_id": end, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    write_json(model / "config.json", config)
    weights = random_weights(model, 0)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    write_gguf(folder / "model.gguf", config, weights)


def write_gguf(out: Path, config: dict[str, Any], weights: dict[str, Any]) -> None:
    """The same weights under llama.cpp's names, experts stacked; a vocabulary of placeholders."""
    import gguf
    import torch

    writer = gguf.GGUFWriter(out, "qwen3moe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    tokens = [f"<{i}>" for i in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["< 0"])
    writer.add_eos_token_id(config["eos_token_id"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config["num_hidden_layers"])
    for name, tensor in stacked(weights).items():
        is_matrix = tensor.dim() > 1 and "gate.weight" not in name
        data = tensor.view(torch.int16).numpy().view("uint8") if is_matrix else tensor.float().numpy()
        kind = gguf.GGMLQuantizationType.BF16 if is_matrix else None
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stacked(weights: dict[str, Any]) -> dict[str, Any]:
    """Experts as llama.cpp has them: one tensor for each projection of a layer."""
    import torch

    found, groups = dict[str, Any](), dict[str, list[Any]]()
    for name, tensor in weights.items():
        owner, _, rest = name.partition(".experts.")
        if rest:
            groups.setdefault(f"{owner}.experts.{rest.partition('.')[2]}", []).append(tensor)
        else:
            found[name] = tensor.contiguous()
    return found | {name: torch.stack(parts) for name, parts in groups.items()}


# --- run


def run(folder: Path, python: str, recipe: str, rounds: int, out: Path) -> int:
    """peers.py on a file that names this one."""
    import runpy

    here, model = str(Path(__file__).resolve()), str(folder / "model")
    peers = [("transformers BF16", [python, here, "transformers", model, "{batch}"], [1, 8])]
    for words in (["BF16"], ["Q8_0"], ["Q8_0", "plain"]):
        peers.append(
            (" ".join(["llama.cpp", *words]), [python, here, "llama", str(folder / "model.gguf"), *words], [1])
        )
    entries = [f"[[peer]]\nname = {json.dumps(n)}\ncommand = {json.dumps(c)}\nbatch = {b}\n" for n, c, b in peers]
    (folder / "peers.toml").write_text("\n".join(entries))
    measure = runpy.run_path(str(Path(__file__).with_name("peers.py")))["main"]
    options = ["--recipe", recipe, "--rounds", str(rounds), "--out", str(out)]
    return int(measure([model, str(folder / "peers.toml"), *options]))


# --- peers


def told(prefill: float, steps: list[float], batch: int) -> None:
    """Print the speeds; of decoding that of the median step."""
    print(json.dumps({"prefill": PROMPT / prefill, "decode": batch / sorted(steps)[len(steps) // 2]}))


def prompts(batch: int, vocabulary: int) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(300, vocabulary) for _ in range(PROMPT)] for _ in range(batch)]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


def transformers(model: str, batch: int) -> None:
    """Its own choice of how experts run."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    ids = torch.tensor(prompts(batch, theirs.config.vocab_size))
    with torch.inference_mode():
        theirs(ids[:1, :8])
        prefill = min(timed(lambda: theirs(ids[:1], use_cache=True))[0] for _ in range(3))
        state, steps = theirs(ids, use_cache=True), []
        for _ in range(NEW):
            token = state.logits[:, -1:].argmax(-1)
            seconds, state = timed(
                lambda t=token, s=state: theirs(t, past_key_values=s.past_key_values, use_cache=True)
            )
            steps.append(seconds)
    told(prefill, steps, batch)


def llama(model: str, kind: str, layout: str = "") -> None:
    """At batch 1, with as many threads as the others."""
    import ctypes

    import llama_cpp
    import numpy as np

    if layout == "plain":
        _without_other_layouts()

    with tempfile.TemporaryDirectory() as folder:
        file = model
        if kind != "BF16":
            out = f"{folder}/{kind}.gguf"
            parameters = llama_cpp.llama_model_quantize_default_params()
            parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
            if llama_cpp.llama_model_quantize(file.encode(), out.encode(), ctypes.byref(parameters)):
                raise SystemExit(f"{file} cannot be quantized to {kind}.")
            file = out
        threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
        engine = llama_cpp.Llama(
            file, n_ctx=1024, n_batch=1024, logits_all=False, verbose=False, n_threads=threads, n_threads_batch=threads
        )
        ids = prompts(1, engine.n_vocab())[0]
        engine.eval(ids[:8])

        def prompt() -> None:
            engine.reset()
            engine.eval(ids)

        prefill, steps = min(timed(prompt)[0] for _ in range(3)), []
        for _ in range(NEW):
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(engine.ctx, -1), (engine.n_vocab(),))
            token = int(logits.argmax())
            steps.append(timed(lambda t=token: engine.eval([t]))[0])
    told(prefill, steps, 1)


def _without_other_layouts() -> None:
    """llama.cpp leaves weights as they lie in the file."""
    import llama_cpp.llama_cpp as library

    usual = library.llama_model_default_params

    def plain() -> Any:
        found = usual()
        found.use_extra_bufts = False
        return found

    library.llama_model_default_params = plain


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make")
    made.add_argument("folder", type=Path)
    for name, usual in (("--experts", 64), ("--layers", 8), ("--hidden", 1024)):
        made.add_argument(name, type=int, default=usual)
    ran = commands.add_parser("run")
    ran.add_argument("folder", type=Path)
    ran.add_argument("--python", required=True)
    ran.add_argument("--recipe", default="rowwise")
    ran.add_argument("--rounds", type=int, default=3)
    ran.add_argument("--out", type=Path, default=Path(__file__).parent)
    peer = commands.add_parser("transformers")
    peer.add_argument("model")
    peer.add_argument("batch", type=int)
    peer = commands.add_parser("llama")
    peer.add_argument("model")
    peer.add_argument("kind", choices=("BF16", "Q8_0"))
    peer.add_argument("layout", nargs="?", default="", choices=("", "plain"))
    options = vars(parser.parse_args())
    call = {"make": make, "run": run, "transformers": transformers, "llama": llama}[options.pop("command")]
    return int(call(**options) or 0)


if __name__ == "__main__":
    sys.exit(main())
