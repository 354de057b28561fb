"""Started by `benchmarks/embeddings.py` for our engine and the peer: embeds the texts of each line and times it.

    python embed_texts.py engine|sentence-transformers MODEL [DTYPE]

in    {"texts": [...], "vectors": bool}
out   {"seconds": ..., "vectors": [[...]] or null}, after a first line with the program's name

`engine` is `fp8serve.engine.embedding.Embedder`; `sentence-transformers` is its `encode` with the batches of 32 that
are its default. OMP_NUM_THREADS is the number of threads.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Encode = Callable[[list[str]], Any]  # texts -> [texts, dimensions]


def engine(model: str) -> tuple[str, Encode]:
    from fp8serve.engine.embedding import Embedder

    embedder = Embedder(model)
    return "fp8serve", lambda texts: embedder.embed(texts, truncate=True).vectors


def sentence_transformers(model: str, dtype: str) -> tuple[str, Encode]:
    from importlib.metadata import version

    import sentence_transformers
    import torch

    peer = sentence_transformers.SentenceTransformer(
        model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)}, local_files_only=True
    )
    return f"sentence-transformers {version('sentence-transformers')}, torch {torch.__version__}", peer.encode


def answer(encode: Encode, request: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    vectors = encode(request["texts"])
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "vectors": vectors.tolist() if request["vectors"] else None}


def main(arguments: Sequence[str]) -> None:
    kind, model, *rest = arguments
    name, encode = (engine if kind == "engine" else sentence_transformers)(model, *rest)
    print(json.dumps({"name": name}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(encode, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
