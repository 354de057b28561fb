"""Counts how many log-probabilities of a server over HTTP equal those of training, to the last bit.

A server is started for each recipe and each type of cache. It gets requests for every way in which a token's
log-probability is computed: in a prompt that fits a step, in one that is cut into chunks, at decoding, after a prefix
from the cache, and among other requests. Training computes the same tokens in one forward pass over whole rows. The
recipe w8a16 does not train: there the same pass runs over the served weights (`fp8serve.log_probs`).
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fp8serve.bench.engine import PASSAGE
from fp8serve.commands.bench import Out, measured, publish, show
from fp8serve.errors import ScalesError
from fp8serve.fp8.attention import KvScale
from fp8serve.fp8.conversion import convert
from fp8serve.fp8.recipe import can_train, from_name
from fp8serve.model.checkpoint import kv_scales, load_trainable
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.running import RunningServer
from fp8serve.terminal import AsJson, Model, print_table
from fp8serve.train import state
from fp8serve.train.forward import Forward
from fp8serve.train.log_probs import log_probs
from fp8serve.train.setup import high_precision_linears

RECIPES = ("bf16", "delayed", "rowwise", "block", "mxfp8", "nvfp4", "w8a16")
CACHES: tuple[Literal["bf16", "fp8"], ...] = ("bf16", "fp8")
STEP_TOKENS = 64  # a longer prompt is cut into chunks
NEW = 24
TEXTS = (PASSAGE, "The capital of France is", "Once upon a time, in a lighthouse", "def fibonacci(n):\n    return")
Post = Callable[[str, Any], Any]  # (route, body) -> its answer
LogProbs = Callable[[Sequence[Sequence[int]]], list[Tensor]]


@dataclass(frozen=True)
class Returned:
    """A server's log-probabilities of the last tokens of `ids`, in order."""

    ids: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True)
class Count:
    equal: int
    tokens: int
    worst: float  # difference, in nats


def measure(model: Path, report: Callable[[str, int, int], None]) -> dict[str, Any]:
    """{"rows": for every recipe, type of cache and way to compute a log-probability: the number of tokens, how many of
    them have equal log-probabilities, and the worst difference}.

    `model` is a directory with delayed scales, also for keys and values; ScalesError if these are missing.
    """
    if not kv_scales(model):
        raise ScalesError(f"{model} has no scales of keys and values; calibrate it with --kv-cache.")
    tokenizer = Tokenizer.from_dir(model)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    rows: list[dict[str, Any]] = []
    cases = [(recipe, cache) for recipe in RECIPES for cache in CACHES]
    with tempfile.TemporaryDirectory() as folder:
        for completed, (recipe, cache) in enumerate(cases):
            report(f"{recipe}, {cache} cache", completed, len(cases))
            data = Path(folder) / f"{recipe}-{cache}"
            with RunningServer(model, _options(recipe, cache, data), log=data.with_suffix(".log")) as server:
                served = ask(server.post, None, prompts)
            counts = compare(served, training(model, recipe, cache))
            rows += [{"recipe": recipe, "cache": cache, "way": way, **vars(count)} for way, count in counts.items()]
    return {"model": str(model), "step_tokens": STEP_TOKENS, "rows": rows}


def _options(recipe: str, cache: str, data: Path) -> list[str]:
    options = {"recipe": served_as(recipe), "kv-cache-dtype": cache, "max-batch-tokens": STEP_TOKENS, "data-dir": data}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def served_as(recipe: str) -> str:
    """Returns the name of a recipe for a server of a directory that has its delayed scales."""
    return "stored" if recipe == "delayed" else recipe


def ask(post: Post, model: str | None, prompts: Sequence[Sequence[int]]) -> dict[str, list[Returned]]:
    """A server's log-probabilities, by the way in which it computes them. The first of `prompts` is longer than a step,
    the others are not."""
    model_field = {} if model is None else {"model": model}

    def of_prompt(ids: Sequence[int]) -> Returned:
        body = {"prompt": list(ids), "max_tokens": 0, "echo": True, "logprobs": 0}
        choice = post("/v1/completions", model_field | body)["choices"][0]
        return Returned(ids, choice["logprobs"]["token_logprobs"][1:])

    def of_answer(ids: Sequence[int]) -> Returned:
        parameters = {"max_new_tokens": NEW, "details": True, "ignore_eos": True}
        body = {"input_ids": list(ids), "parameters": parameters}
        tokens = post("/generate", model_field | body)["details"]["tokens"]
        return Returned([*ids, *(token["id"] for token in tokens)], [token["logprob"] for token in tokens])

    long, *short = prompts
    answers = [of_answer(ids) for ids in prompts]
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        among = [*pool.map(of_answer, prompts), *pool.map(of_prompt, prompts)]
    return {
        "prompt": [of_prompt(ids) for ids in short],
        "prompt in chunks": [of_prompt(long)],
        "decoding": answers,
        "cached prefix": [_cached(post, model_field, answer) for answer in answers[:1]],
        "among others": among,
    }


def _cached(post: Post, model_field: Mapping[str, Any], answer: Returned) -> Returned:
    """Generates the last half of an answer again, after a prefix that the server has cached."""
    start = len(answer.ids) - len(answer.values) // 2
    body = {"prompt": list(answer.ids[:start]), "max_tokens": len(answer.ids) - start, "logprobs": 0, "temperature": 0}
    response = post("/v1/completions", {**model_field, **body, "ignore_eos": True})
    return Returned(answer.ids, response["choices"][0]["logprobs"]["token_logprobs"])


def training(model: Path, recipe: str, cache: Literal["bf16", "fp8"]) -> LogProbs:
    """Returns a function that computes log-probabilities as training does, with the weights and scales in `model`."""
    fp8_recipe = from_name(recipe)
    if not can_train(fp8_recipe):
        return lambda ids: log_probs(model, ids, recipe=recipe, kv_cache_dtype=cache)
    decoder = load_trainable(model)
    if fp8_recipe is not None:
        convert(decoder, skip=(decoder.head_name, *high_precision_linears(model)))
    scales = [KvScale.of(*pair) for _, pair in sorted(kv_scales(model).items())] if cache == "fp8" else None
    forward = Forward(decoder, fp8_recipe, scales)
    state.seed_scaling(forward, model)
    return lambda ids: log_probs(forward, ids)


def compare(served: Mapping[str, Sequence[Returned]], trained: LogProbs) -> dict[str, Count]:
    """Counts the equal values for every way to compute them."""
    return {way: _count(list(_pairs(returned, trained))) for way, returned in served.items()}


def _pairs(returned: Sequence[Returned], trained: LogProbs) -> Iterator[tuple[Tensor, Tensor]]:
    for one, expected in zip(returned, trained([one.ids for one in returned]), strict=True):
        yield torch.tensor(one.values), expected[len(expected) - len(one.values) :]


def _count(pairs: Sequence[tuple[Tensor, Tensor]]) -> Count:
    actual, expected = (torch.cat(side) for side in zip(*pairs, strict=True))
    difference = (actual - expected).abs()
    return Count(int((actual == expected).sum()), len(actual), float(difference.max()))


def command(model: Model, out: Out = None, json: AsJson = False) -> None:
    """Compare a server's log-probabilities over HTTP with training's, bit for bit, under every recipe and cache.

    
    Examples:
      python -m benchmarks.studies parity ./llama-fp8                # calibrated with --kv-cache
      python -m benchmarks.studies parity ./llama-fp8 --out figures
    """
    from fp8serve.hub import find_model

    directory = find_model(model)
    figures = measured("Parity", lambda report: measure(directory, report))
    show(publish("parity", figures, out), json, _print)


def _print(result: Mapping[str, Any]) -> None:
    rows = [
        (row["recipe"], row["cache"], row["way"], f"{row['equal']} of {row['tokens']}", f"{row['worst']:.2g}")
        for row in result["rows"]
    ]
    print_table(("recipe", "KV cache", "token of", "equal", "worst difference, nats"), rows)
