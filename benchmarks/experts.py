"""A mixture of experts on this CPU: our engine in FP8 beside transformers and llama.cpp, in one run of peers.py.

    python benchmarks/experts.py DIR --python /envs/hf/bin/python [--recipe rowwise] [--rounds 3] [--out benchmarks]
                                 [--experts 64] [--layers 8] [--hidden 1024]

Makes DIR/model, a Qwen3-MoE with random weights in BF16, and DIR/model.gguf, which `fp8serve convert` writes from it
for llama.cpp, unless they exist. Then measures, and prints one JSON object, which is also written to OUT as
experts-<date>.json. PYTHON is the interpreter of an environment with `transformers` and `llama-cpp-python`. A program
that fails, such as a peer that is not installed, is named on standard error, and the exit status is then 1.

The peers are our own engine with a head in FP8, which compares with llama.cpp's Q8_0; transformers in BF16; and
llama.cpp in BF16 and in Q8_0, which has as many bytes as ours. Q8_0 runs twice: as llama.cpp chooses to run it, and
with its weights in the order of the file ("plain"), because with AMX llama-cpp-python 0.3.36 crashes on experts in Q8_0
when there is more than one token. All decode greedily after random prompts of 256 tokens, one sequence and eight.

    python benchmarks/experts.py transformers DIR/model BATCH
    python benchmarks/experts.py llama DIR/model.gguf BF16|Q8_0 BATCH [plain]

These are the peers; each prints {"prefill": tokens/s, "decode": tokens/s}.
"""

import argparse
import contextlib
import io
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPT, NEW = 256, 64
TEXTS = ["The router sends every token to a few experts.", "A weight of eight bits is read in half the time."]


# --- make


def make(folder: Path, experts: int, layers: int, hidden: int) -> None:
    """Makes DIR/model and DIR/model.gguf. SystemExit when DIR holds a model of other sizes."""
    from safetensors.torch import save_file

    from fp8serve.model.gguf.writer import write_gguf
    from fp8serve.model.storage.files import write_json
    from fp8serve.train.scratch import END, random_weights, train_tokenizer

    model, config = folder / "model", sizes(experts, layers, hidden)
    if (folder / "model.gguf").exists():
        existing = json.loads((model / "config.json").read_text(encoding="utf-8"))
        if other := [key for key, value in config.items() if existing.get(key) != value]:
            raise SystemExit(f"{model} was made with another {other[0]}; give another folder, or remove this one.")
        return
    model.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(TEXTS, 512)
    tokenizer.save(str(model / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    write_json(model / "config.json", config | {"bos_token_id": end, "eos_token_id": end})
    save_file(random_weights(model, 0), model / "model.safetensors", {"format": "pt"})
    write_gguf(model, folder / "model.gguf")


def sizes(experts: int, layers: int, hidden: int) -> dict[str, Any]:
    """Returns the contents of config.json, without the ids of special tokens."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32000, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "moe_intermediate_size": hidden // 2, "num_experts": experts,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": layers, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip


# --- run


def run(folder: Path, python: str, recipe: str, rounds: int, out: Path) -> int:
    """Runs peers.py on a file of peers whose commands start this script. Returns 1 if a program failed."""
    import runpy

    here, model = str(Path(__file__).resolve()), str(folder / "model")
    gguf = str(folder / "model.gguf")
    ours = [sys.executable, "-m", "fp8serve.cli", "bench", "engine", model, "--recipe", recipe, "--head-dtype", "fp8"]
    peers = [("fp8serve, head in FP8", [*ours, "--batch", "{batch}", "--json"])]
    peers.append(("transformers BF16", [python, here, "transformers", model, "{batch}"]))
    for kind, *layout in (["BF16"], ["Q8_0"], ["Q8_0", "plain"]):
        command = [python, here, "llama", gguf, kind, "{batch}", *layout]
        peers.append((" ".join(["llama.cpp", kind, *layout]), command))
    entries = [f"[[peer]]\nname = {json.dumps(n)}\ncommand = {json.dumps(c)}\nbatch = [1, 8]\n" for n, c in peers]
    (folder / "peers.toml").write_text("\n".join(entries))
    peers_py = runpy.run_path(str(Path(__file__).with_name("peers.py")))
    options = ["--recipe", recipe, "--rounds", str(rounds), "--out", str(folder)]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        failed = peers_py["main"]([model, str(folder / "peers.toml"), *options])
    print(output.getvalue(), file=sys.stderr)
    path = re.findall(r"^written: (.+)$", output.getvalue(), re.MULTILINE)[-1]
    result = {"model": json.loads((folder / "model/config.json").read_text()), **json.loads(Path(path).read_text())}
    out.mkdir(parents=True, exist_ok=True)
    (out / Path(path).name.replace("peers", "experts")).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(failed)


# --- peers


def print_speeds(prefill: float, steps: list[float], batch: int) -> None:
    """Prints the speeds; for decoding, that of the median step."""
    print(json.dumps({"prefill": PROMPT / prefill, "decode": batch / sorted(steps)[len(steps) // 2]}))


def prompts(batch: int, vocabulary: int) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(300, vocabulary) for _ in range(PROMPT)] for _ in range(batch)]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def transformers(model: str, batch: str) -> None:
    """transformers, which chooses by itself how experts run."""
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
    print_speeds(prefill, steps, int(batch))


def llama(model: str, kind: str, batch: str, layout: str = "") -> None:
    """llama.cpp, with as many threads as the others. layout "plain": weights keep the order that they have in the
    file."""
    from llama_cpp import llama_cpp as library

    engine = LlamaCpp(library, _quantized(library, model, kind), int(batch), layout != "plain")
    texts = prompts(int(batch), engine.vocabulary)
    engine.read(0, texts[0][:8])

    def prompt() -> None:
        engine.forget()
        engine.read(0, texts[0])

    prefill, steps = min(timed(prompt)[0] for _ in range(3)), []
    engine.forget()
    tokens = [engine.read(sequence, text) for sequence, text in enumerate(texts)]
    for number in range(NEW):
        seconds, tokens = timed(lambda t=tokens, n=number: engine.step(t, PROMPT + n))
        steps.append(seconds)
    print_speeds(prefill, steps, int(batch))


def _quantized(library: Any, model: str, kind: str) -> str:
    """Returns the path of the model in another type, which is made beside it unless it exists."""
    import ctypes

    if kind == "BF16":
        return model
    out, temporary = model.replace(".gguf", f"-{kind}.gguf"), f"{model}.{os.getpid()}"
    if not os.path.exists(out):
        parameters = library.llama_model_quantize_default_params()
        parameters.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{kind}")
        if library.llama_model_quantize(model.encode(), temporary.encode(), ctypes.byref(parameters)):
            raise SystemExit(f"{model} cannot be quantized to {kind}.")
        os.replace(temporary, out)
    return out


class LlamaCpp:
    """Decodes several sequences with llama.cpp's own functions, because the Python class decodes only one."""

    def __init__(self, library: Any, path: str, sequences: int, repacks: bool) -> None:
        self._library = library
        settings = library.llama_model_default_params()
        settings.use_extra_bufts = repacks
        model = library.llama_model_load_from_file(path.encode(), settings)
        if not model:
            raise SystemExit(f"llama.cpp cannot read {path}; its output is above.")
        self.vocabulary: int = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
        options = library.llama_context_default_params()
        options.n_ctx, options.n_seq_max = 512 * sequences, sequences
        options.n_batch = options.n_ubatch = 512
        options.n_threads = options.n_threads_batch = threads
        self._context = library.llama_init_from_model(model, options)
        self._batch = library.llama_batch_init(512, 0, 1)

    def forget(self) -> None:
        """Clears the KV cache of every sequence."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def read(self, sequence: int, ids: list[int]) -> int:
        """Reads a whole prompt; returns the likeliest next token."""
        self._decode([(token, position, sequence) for position, token in enumerate(ids)], only_last=True)
        return self._likeliest(-1)

    def step(self, tokens: list[int], position: int) -> list[int]:
        """Reads a token of every sequence, all at the same position; returns the likeliest next tokens."""
        self._decode([(token, position, sequence) for sequence, token in enumerate(tokens)], only_last=False)
        return [self._likeliest(row) for row in range(len(tokens))]

    def _decode(self, rows: list[tuple[int, int, int]], only_last: bool) -> None:
        """rows: (token, position, sequence). Logits are computed for every row, or only for the last one."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = not only_last or i == len(rows) - 1
        if status := self._library.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode of {len(rows)} tokens gave {status}.")

    def _likeliest(self, row: int) -> int:
        import numpy as np

        logits = self._library.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())


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
