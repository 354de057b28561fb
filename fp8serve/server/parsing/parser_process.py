"""The process that parses and tokenizes what clients send: `python -m fp8serve.server.parsing.parser_process FORMAT`.

It runs one job at a time; FORMAT is the format of its log. Parsing, validation, templates and tokenizers take as long
as a client's text makes them and hold Python's global lock, so they run outside the server, with limits
(model/text/limited_process.py). Templates and tokenizers are code that came with a model. Besides these processes, only
the engine process runs a tokenizer, to decode. This module does not import torch.
"""

import importlib
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from fp8serve import logs
from fp8serve.model.text.limited_process import JobResult, Jobs, serve, set_cpu_limit
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.model.text.tokenizer_facts import TokenTable
from fp8serve.processes import Head
from fp8serve.server.parsing.texts import TextRequest, encode_text

MAX_END_TOKENS = 16
"""How many tokens at the end of a conversation are searched for the special token that starts reasoning."""


# -- jobs --------------------------------------------------------------------------------------------------------------


@lru_cache(8)  # several models may be served or loading
def _tokenizer(directory: str) -> Tokenizer:
    return Tokenizer.from_dir(Path(directory))


def split(head: Head, body: bytes) -> list[str]:
    """Splits the body into texts, whose lengths in bytes are in the head."""
    texts, start = [], 0
    for length in head["lengths"]:
        texts.append(body[start : start + length].decode())
        start += length
    return texts


def _encode(head: Head, body: bytes) -> JobResult:
    tokenizer = _tokenizer(head["directory"])
    return {"prompts": [_ids(tokenizer, text, head) for text in split(head, body)]}, b""


def _pairs(head: Head, body: bytes) -> JobResult:
    tokenizer, texts = _tokenizer(head["directory"]), iter(split(head, body))
    rows = zip(texts, texts, head["limits"], strict=True)
    prompt_parts, prefix = head["prompt_parts"], head["prefix"]
    requests = (
        TextRequest(first, None if is_single else second, max_tokens, max_document_tokens, prompt_parts, prefix)
        for first, second, (is_single, max_tokens, max_document_tokens) in rows
    )
    return {"pairs": [encode_text(tokenizer, request) for request in requests]}, b""


def _chat(head: Head, body: bytes) -> JobResult:
    tokenizer = _tokenizer(head["directory"])
    prompt = _ids(tokenizer, _render(tokenizer, head, body), head | {"special": False})
    return {"prompts": [prompt], "end": tokenizer.decode(prompt["ids"][-MAX_END_TOKENS:], False)}, b""


def _count(head: Head, body: bytes) -> JobResult:
    tokenizer = _tokenizer(head["directory"])
    text = _render(tokenizer, head, body)
    return {"count": len(tokenizer.encode(text, False))}, b""


def _render(tokenizer: Tokenizer, head: Head, body: bytes) -> str:
    """Renders the conversation. The caller encodes it without BOS, because templates write BOS themselves."""
    set_cpu_limit(head["template_cpu"])
    if head["ending"] == "continued":
        text = tokenizer.chat_to_continue(json.loads(body), head["variables"])
    else:
        text = tokenizer.chat(json.loads(body), head["ending"] == "prompted", head["variables"])
    set_cpu_limit(head["cpu"])
    return text


def _ids(tokenizer: Tokenizer, text: str, head: Head) -> Head:
    """Tokenizes a text and keeps its last `max_tokens` ids (None: all). Returns their count, but no ids if they exceed
    `context`. A text that is certain to exceed it is not tokenized: `count` is a lower bound, and `exact` is False."""
    if head["max_tokens"] is None and (lower_bound := tokenizer.min_token_count(text)) > head["context"]:
        return {"count": lower_bound, "exact": False, "ids": []}
    ids = tokenizer.encode(text, head["special"])
    ids = ids[-head["max_tokens"] :] if head["max_tokens"] else ids
    return {"count": len(ids), "exact": True, "ids": ids if len(ids) <= head["context"] else []}


def _tokenize(head: Head, body: bytes) -> JobResult:
    """Returns the response body of /tokenize, which may be too large to be serialized in the server."""
    tokenizer, messages = _tokenizer(head["directory"]), head["messages"]
    text = _render(tokenizer, head, body) if messages else body.decode()
    ids = tokenizer.encode(text, head["special"] and not messages)
    strings = [tokenizer.token_text(i) for i in ids] if head["strings"] else None
    answer = {"count": len(ids), "max_model_len": head["context"], "tokens": ids, "token_strs": strings}
    return {}, json.dumps(answer, separators=(",", ":")).encode()


def _detokenize(head: Head, body: bytes) -> JobResult:
    text = _tokenizer(head["directory"]).decode_known(json.loads(body), head["skip_special"])
    return {}, json.dumps({"prompt": text}, separators=(",", ":")).encode()


def _echo(head: Head, body: bytes) -> JobResult:
    """Returns the texts of prompts, and for each token the number of characters that it adds to the text."""
    tokenizer, texts, lengths = _tokenizer(head["directory"]), list[str](), []
    for ids in json.loads(body):
        decoder = tokenizer.stream(head["skip_special"])
        pieces = [decoder.push(token_id) for token_id in ids]
        lengths.append([len(piece) for piece in pieces])
        texts.append("".join([*pieces, decoder.flush()]))
    return {}, json.dumps([texts, lengths]).encode()


def _table(head: Head, body: bytes) -> JobResult:
    return {}, TokenTable.serialize(_tokenizer(head["directory"]), head["size"])


def _check_grammar(head: Head, body: bytes) -> JobResult:
    """Raises RequestError if the grammar cannot be compiled. The body holds it as fields of SamplingParams."""
    from fp8serve.engine.grammar import validate
    from fp8serve.engine.sampling_params import SamplingParams

    validate(SamplingParams(**json.loads(body)))
    return {}, b""


def _check(head: Head, body: bytes) -> JobResult:
    """Validates a request body. Returns the fields that the client set, as JSON, or the first error.

    Rows of training data are written to files in `folder` and replaced by one empty row. Token ids are truncated to the
    last `truncate` ones.
    """
    from pydantic import ValidationError

    from fp8serve.server.faults import Fault
    from fp8serve.server.parsing.sizes import ROWS, SizeLimits, check_keys, write_rows

    module, name = head["model"].split(":")
    model = getattr(importlib.import_module(module), name)
    try:
        request = model.model_validate(json.loads(body))
    except (ValueError, RecursionError) as error:
        return {"complaint": _first_error(error) if isinstance(error, ValidationError) else NOT_JSON}, b""
    try:
        SizeLimits(**head["sizes"]).check(request)
        if not model.model_fields.keys().isdisjoint(ROWS):
            check_keys(body)
    except Fault as fault:
        return {
            "fault": {"message": fault.message, "param": fault.param, "hint": fault.hint},
            "code": fault.code.value,
        }, b""
    plain = request.model_dump(exclude_unset=True, by_alias=True)
    if (cut := plain.get("parameters", {}).get("truncate")) and "input_ids" in plain:
        plain["input_ids"] = plain["input_ids"][-cut:]
    for name in ROWS:
        if isinstance(plain.get(name), list):
            folder = Path(head["folder"])
            folder.mkdir(mode=0o700, exist_ok=True)
            write_rows(folder / f"{name}.jsonl", plain[name], head["rows"], head["row_bytes"])
            plain[name] = [{}]
    return {}, json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode()


NOT_JSON = {"type": "json_invalid", "loc": ["body"], "msg": "JSON decode error"}


def _first_error(error: Any) -> Head:
    first = error.errors(include_url=False, include_input=False)[0]
    context = {k: v if isinstance(v, int | float | str) else str(v) for k, v in first.get("ctx", {}).items()}
    return {"type": first["type"], "loc": ["body", *first["loc"]], "msg": first["msg"], "ctx": context}


def _dry_run(head: Head, body: bytes) -> JobResult:
    from fp8serve.train.config import TrainConfig
    from fp8serve.train.validate import data_report

    return {}, data_report(TrainConfig.from_json(body.decode())).to_json().encode()


def _check_rows(head: Head, body: bytes) -> JobResult:
    from fp8serve.train.config import TrainConfig
    from fp8serve.train.validate import read_files

    request = json.loads(body)
    read_files(TrainConfig.from_json(request["config"]), request["files"])
    return {}, b""


def _first_rows(head: Head, body: bytes) -> JobResult:
    from fp8serve.train.config import TrainConfig
    from fp8serve.train.validate import first_rows

    request = json.loads(body)
    rows = first_rows(TrainConfig.from_json(request["config"]), request["files"], request["max_tokens"])
    return {}, json.dumps([[row.ids.tolist(), row.loss.tolist()] for row in rows]).encode()


JOBS: Jobs = {
    "encode": _encode,
    "pairs": _pairs,
    "chat": _chat,
    "count": _count,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
    "echo": _echo,
    "table": _table,
    "check_grammar": _check_grammar,
    "check": _check,
    "dry_run": _dry_run,
    "check_rows": _check_rows,
    "first_rows": _first_rows,
}


def _prepare(head: Head) -> None:
    if "directory" in head:
        _tokenizer(head["directory"])  # loading the tokenizer does not count towards the job's limits


def main(log_format: logs.LogFormat = "plain") -> int:
    logs.configure(log_format, "parser")
    serve(JOBS, _prepare)
    return 0


if __name__ == "__main__":
    sys.exit(main("json" if sys.argv[1:] == ["json"] else "plain"))
