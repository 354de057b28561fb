"""Structured output of a real model: how many answers are valid, and the cost of a schema.

    python benchmarks/structured.py MODEL [--answers 200] [--batch 8] [--recipe NAME] [--threads 2]

Asks for JSON of several schemas at temperature 1, `--batch` answers at a time, and validates each with the package
`jsonschema_rs`, not with the library that constrained it. Then times decoding steps of `--batch` rows with a schema and
without one, in turns, on the same engine. The cost of a schema is the difference of the median steps; on a busy
machine, compare the fastest steps. Also times a row's mask, which is computed in a thread beside the forward pass.
Prints JSON. Threads wait as they do in `fp8serve serve`.
"""

# ruff: noqa: E402

import argparse
import json
import statistics
import time
from typing import Any

from fp8serve.cli import prepare_environment

prepare_environment(["serve"])  # before torch is imported

import jsonschema_rs
import torch

from fp8serve.bench.figures import provenance
from fp8serve.engine.engine import Engine
from fp8serve.engine.grammar import Masks
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.hub import find_model

NAME = {"type": "string", "minLength": 1, "maxLength": 24}
SCHEMAS: dict[str, dict[str, Any]] = {
    "A person": {
        "type": "object",
        "properties": {
            "name": NAME,
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "admin": {"type": "boolean"},
        },
        "required": ["name", "age", "admin"],
        "additionalProperties": False,
    },
    "A shopping list": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"item": NAME, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["item", "count"],
            "additionalProperties": False,
        },
        "minItems": 2,
        "maxItems": 4,
    },
    "A weather report": {
        "type": "object",
        "properties": {
            "city": NAME,
            "sky": {"enum": ["clear", "cloudy", "rain", "snow"]},
            "celsius": {"type": "number", "minimum": -50, "maximum": 60, "multipleOf": 0.1},
        },
        "required": ["city", "sky", "celsius"],
        "additionalProperties": False,
    },
    "A tree of folders": {
        "$ref": "#/$defs/folder",
        "$defs": {
            "folder": {
                "type": "object",
                "properties": {
                    "name": NAME,
                    "inside": {"type": "array", "items": {"$ref": "#/$defs/file"}, "maxItems": 3},
                },
                "required": ["name", "inside"],
                "additionalProperties": False,
            },
            "file": {"anyOf": [NAME, {"type": "null"}]},
        },
    },
}


def prompt_of(engine: Engine, subject: str) -> tuple[int, ...]:
    assert engine.tokenizer is not None
    messages = [{"role": "user", "content": f"{subject}, as JSON. Answer with the JSON alone."}]
    return tuple(engine.tokenizer.encode_chat(messages))


def requests(engine: Engine, count: int, with_schema: bool, **params: Any) -> dict[str, tuple[str, Request]]:
    """Returns (subject, request) by the id of the request."""
    subjects, results = list(SCHEMAS), {}
    for number in range(count):
        subject = subjects[number % len(subjects)]
        schema = {"json_schema": json.dumps(SCHEMAS[subject])} if with_schema else {}
        sampling = SamplingParams(temperature=1.0, seed=number, **schema, **params)
        results[str(number)] = subject, Request(str(number), prompt_of(engine, subject), sampling)
    return results


def answers(engine: Engine, count: int) -> dict[str, Any]:
    """Returns how many answers are valid JSON of their schemas, and how fast they were."""
    args, texts, tokens = requests(engine, count, with_schema=True, max_new_tokens=512), dict[str, str](), 0
    began = time.perf_counter()
    for _, request in args.values():
        engine.add_request(request)
    while engine.has_work():
        for output in engine.step():
            texts[output.request_id] = texts.get(output.request_id, "") + output.text_delta
            tokens += len(output.token_ids)
    seconds = time.perf_counter() - began
    wrong = [texts[name] for name, (subject, _) in args.items() if not is_valid(texts[name], SCHEMAS[subject])]
    return {
        "asked": count,
        "valid": count - len(wrong),
        "wrong": wrong[:3],
        "tokens_per_second": round(tokens / seconds, 1),
    }


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        return jsonschema_rs.is_valid(schema, json.loads(text))
    except ValueError:
        return False


def steps(engine: Engine, batch: int, with_schema: bool, count: int) -> list[float]:
    """Seconds of up to `count` - 1 steps in which each of `batch` rows got a token. With a schema, a new request
    replaces each one that ends."""
    options = {"max_new_tokens": count} if with_schema else {"max_new_tokens": count, "ignore_eos": True}
    pending = iter(requests(engine, 1 << 12 if with_schema else batch, with_schema, **options).values())
    seconds = list[float]()
    for _ in range(batch):
        engine.add_request(next(pending)[1])
    while len(seconds) < count - 1:
        began = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == batch and not any(output.num_generated == 1 for output in outputs):
            seconds.append(time.perf_counter() - began)
        for output in outputs:
            if output.finish_reason is not None and with_schema:
                engine.add_request(next(pending)[1])
        if not engine.has_work():
            break
    engine.abort_all()
    return seconds


def fastest(pairs: list[tuple[list[float], list[float]]], side: int) -> float:
    """Returns the median of each turn's fastest step."""
    return statistics.median(min(pair[side]) for pair in pairs)


def masks(engine: Engine, batch: int) -> float:
    """Microseconds of processor time for one row's mask, in the middle of an answer, nothing else running."""
    for _, request in requests(engine, batch, with_schema=True, max_new_tokens=64).values():
        engine.add_request(request)
    maker, times = Masks(engine.limits.vocab_size), list[float]()
    for _ in range(24):
        engine.step()
        seqs = list(engine.scheduler.running)
        if len(seqs) == batch:
            began = time.process_time()
            mask = maker.start([seq.matcher for seq in seqs])
            assert mask is not None
            mask.allowed()
            times.append(time.process_time() - began)
    engine.abort_all()
    return round(1e6 * statistics.median(times) / batch, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--recipe", default="stored")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine = Engine(find_model(args.model), recipe=args.recipe, max_num_seqs=args.batch, max_model_len=1024)
    engine.generate(["warm"], max_new_tokens=8)
    engine.pack_weights()
    results = answers(engine, args.answers)
    pairs = [(steps(engine, args.batch, False, 48), steps(engine, args.batch, True, 48)) for _ in range(5)]
    plain, formed = (statistics.median(step for pair in pairs for step in pair[side]) for side in (0, 1))
    cost = {
        "plain_step_ms": round(1e3 * plain, 3),
        "formed_step_ms": round(1e3 * formed, 3),
        "plain_tokens_per_second": round(args.batch / plain, 1),
        "formed_tokens_per_second": round(args.batch / formed, 1),
        "formed_to_plain_step": round(formed / plain, 4),
        "formed_to_plain_fastest_step": round(fastest(pairs, 1) / fastest(pairs, 0), 4),
        "mask_microseconds_per_row": masks(engine, args.batch),
    }
    print(
        json.dumps(
            {"batch": args.batch, "answers": results, "steps": cost, **provenance("python benchmarks/structured.py")},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
