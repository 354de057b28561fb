"""A mixture of experts on this CPU: our engine in FP8 beside transformers and llama.cpp, in one run of peers.py.

    python benchmarks/experts.py DIR --python /envs/hf/bin/python [--recipe rowwise] [--rounds 3] [--out benchmarks]
                                 [--experts 64] [--layers 8] [--hidden 1024]

makes DIR/model, a Qwen3-MoE with random weights in BF16, and DIR/model.gguf, which `fp8serve convert` writes of it for
llama.cpp, unless they are there; measures; and prints one JSON object, which it also leaves in OUT as
experts-<date>.json. PYTHON is the interpreter of an environment with `transformers` and `llama-cpp-python`; what
failed, such as a peer that is not installed, is named on standard error, and the exit status is then 1. Peers:
transformers in BF16; llama.cpp in BF16 and, of the same bytes as ours, in Q8_0: as it chooses to run it, and with its
weights as they lie in the file ("plain"), for with AMX and more than one token llama-cpp-python 0.3.36 crashes on
experts in Q8_0. All decode greedily behind random prompts of 256 tokens; llama.cpp at batch 1 only.

    python benchmarks/experts.py transformers DIR/model BATCH
    python benchmarks/experts.py llama DIR/model.gguf BF16|Q8_0 [plain]

are the peers, and print {"prefill": tokens/s, "decode": tokens/s}.
"""

import argparse
import contextlib
import io
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPT, NEW = 256, 64
TEXTS = ["The router sends every token to a few experts.", "A weight of eight bits is read in half the time."]


# --- make


def make(folder: Path, experts: int, layers: int, hidden: int) -> None:
    """DIR/model and DIR/model.gguf. SystemExit when there is a model of other sizes."""
    from safetensors.torch import save_file

    from fp8serve.model.gguf.writing import write_gguf
    from fp8serve.model.storage.files import write_json
    from fp8serve.train.scratch import END, random_weights, train_tokenizer

    model, wanted = folder / "model", sizes(experts, layers, hidden)
    if (folder / "model.gguf").exists():
        made = json.loads((model / "config.json").read_text(encoding="utf-8"))
        if other := [key for key, value in wanted.items() if made.get(key) != value]:
            raise SystemExit(f"{model} was made with another {other[0]}; give another folder, or remove it.")
        return
    model.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(TEXTS, 512)
    tokenizer.save(str(model / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    write_json(model / "config.json", wanted | {"bos_token_id": end, "eos_token_id": end})
    save_file(random_weights(model, 0), model / "model.safetensors", {"format": "pt"})
    write_gguf(model, folder / "model.gguf")


def sizes(experts: int, layers: int, hidden: int) -> dict[str, Any]:
    """Of config.json."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32000, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "moe_intermediate_size": hidden // 2, "num_experts": experts,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip


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
    peers_py = runpy.run_path(str(Path(__file__).with_name("peers.py")))
    options = ["--recipe", recipe, "--rounds", str(rounds), "--out", str(folder)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        failed = peers_py["main"]([model, str(folder / "peers.toml"), *options])
    print(said.getvalue(), file=sys.stderr)
    written = re.findall(r"^written: (.+)$", said.getvalue(), re.MULTILINE)[-1]
    found = {"model": json.loads((folder / "model/config.json").read_text()), **json.loads(Path(written).read_text())}
    out.mkdir(parents=True, exist_ok=True)
    (out / Path(written).name.replace("peers", "experts")).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return int(failed)


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


def transformers(model: str, batch: str) -> None:
    """Its own choice of how experts run."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    ids = torch.tensor(prompts(int(batch), theirs.config.vocab_size))
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
    told(prefill, steps, int(batch))


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


def main(arguments: Sequence[str]) -> int:
    """0 when every program gave its figures."""
    peers: dict[str, Callable[..., None]] = {"transformers": transformers, "llama": llama}
    if arguments and arguments[0] in peers:
        _, model, setting, *rest = arguments
        try:
            peers[arguments[0]](model, setting, *rest)
        except ImportError as missing:
            raise SystemExit(
                f"{sys.executable} has no {missing.name}; install it there, with pip for example."
            ) from None
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", required=True)
    parser.add_argument("--recipe", default="rowwise")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    for name, usual in (("--experts", 64), ("--layers", 8), ("--hidden", 1024)):
        parser.add_argument(name, type=int, default=usual)
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    make(folder, options.experts, options.layers, options.hidden)
    return run(folder, options.python, options.recipe, options.rounds, options.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
