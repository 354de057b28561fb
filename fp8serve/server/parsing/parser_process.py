"""The process that reads what clients send: `python -m fp8serve.server.parsing.parser_process`, one job at a time.
Its one argument is the form of its log.

Parsing, validating, rendering a template and tokenizing cost as much as a client cares to send, and hold Python's lock;
here they hold nobody else's, and have limits (model/text/limited_process.py). Templates and tokenizers are programs
that came with a model: of a server's processes only these run them, and the engine, which decodes. This module imports
no torch.
"""

import importlib
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from fp8serve import logs
from fp8serve.model.text.limited_process import Answer, Jobs, allow, serve
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.model.text.tokenizer_facts import TokenTable
from fp8serve.processes import Head
from fp8serve.server.parsing.texts import TextRequest, read_text

MAX_LISTED_TOKENS = 16
"""Tokens at the end of a conversation that may hold the mark with which reasoning begins."""


# -- jobs --------------------------------------------------------------------------------------------------------------


@lru_cache(8)  # of the models that are served beside each other, and of what is about to be
def _tokenizer(directory: str) -> Tokenizer:
    return Tokenizer.from_dir(Path(directory))


def split(head: Head, body: bytes) -> list[str]:
    """The texts that `lengths` (bytes each) cut the body into."""
    texts, start = [], 0
    for length in head["lengths"]:
        texts.append(body[start : start + length].decode())
        start += length
    return texts


def _encode(head: Head, body: bytes) -> Answer:
    tokenizer = _tokenizer(head["directory"])
    return {"prompts": [_ids(tokenizer, text, head) for text in split(head, body)]}, b""


def _pairs(head: Head, body: bytes) -> Answer:
    tokenizer, texts = _tokenizer(head["directory"]), iter(split(head, body))
    pairs = zip(texts, texts, head["forms"], strict=True)
    around, before = head["around"], head["before"]
    requests = (
        TextRequest(one, None if single else two, most, cut, around, before) for one, two, (single, most, cut) in pairs
    )
    return {"pairs": [read_text(tokenizer, each) for each in requests]}, b""


def _chat(head: Head, body: bytes) -> Answer:
    tokenizer = _tokenizer(head["directory"])
    prompt = _ids(tokenizer, _render(tokenizer, head, body), head | {"special": False})
    return {"prompts": [prompt], "end": tokenizer.decode(prompt["ids"][-MAX_LISTED_TOKENS:], False)}, b""


def _count(head: Head, body: bytes) -> Answer:
    tokenizer = _tokenizer(head["directory"])
    text = _render(tokenizer, head, body)
    return {"count": len(tokenizer.encode(text, False))}, b""


def _render(tokenizer: Tokenizer, head: Head, body: bytes) -> str:
    """The template writes BOS itself where the model wants one: its text is encoded without."""
    allow(head["template_cpu"])
    if head["ending"] == "continued":
        text = tokenizer.begun_chat(json.loads(body), head["variables"])
    else:
        text = tokenizer.chat(json.loads(body), head["ending"] == "prompted", head["variables"])
    allow(head["cpu"])
    return text


def _ids(tokenizer: Tokenizer, text: str, head: Head) -> Head:
    """How many there are, and the last `keep` of them; without them when they are more than `most`."""
    if head["keep"] is None and (least := tokenizer.fewest_tokens(text)) > head["most"]:
        return {"count": least, "exact": False, "ids": []}
    ids = tokenizer.encode(text, head["special"])
    shortened = ids[-head["keep"] :] if head["keep"] else ids
    return {"count": len(shortened), "exact": True, "ids": shortened if len(shortened) <= head["most"] else []}


def _tokenize(head: Head, body: bytes) -> Answer:
    """The whole answer of /tokenize: it may hold more numbers than the front should write."""
    tokenizer, messages = _tokenizer(head["directory"]), head["messages"]
    text = _render(tokenizer, head, body) if messages else body.decode()
    ids = tokenizer.encode(text, head["special"] and not messages)
    strings = [tokenizer.token_text(i) for i in ids] if head["strings"] else None
    answer = {"count": len(ids), "max_model_len": head["most"], "tokens": ids, "token_strs": strings}
    return {}, json.dumps(answer, separators=(",", ":")).encode()


def _detokenize(head: Head, body: bytes) -> Answer:
    text = _tokenizer(head["directory"]).decode_known(json.loads(body), head["skip"])
    return {}, json.dumps({"prompt": text}, separators=(",", ":")).encode()


def _echo(head: Head, body: bytes) -> Answer:
    """For each prompt how many characters of its text each of its tokens makes certain; and the texts."""
    tokenizer, texts, lengths = _tokenizer(head["directory"]), list[str](), []
    for ids in json.loads(body):
        decoder = tokenizer.stream(head["skip"])
        pieces = [decoder.push(token_id) for token_id in ids]
        lengths.append([len(piece) for piece in pieces])
        texts.append("".join([*pieces, decoder.flush()]))
    return {}, json.dumps([texts, lengths]).encode()


def _table(head: Head, body: bytes) -> Answer:
    return {}, TokenTable.written(_tokenizer(head["directory"]), head["size"])


def _form(head: Head, body: bytes) -> Answer:
    """Nothing, or RequestError where an answer cannot have the form."""
    from fp8serve.engine.grammar import validate
    from fp8serve.engine.sampling_params import SamplingParams

    validate(SamplingParams(**json.loads(body)))
    return {}, b""


def _check(head: Head, body: bytes) -> Answer:
    """A request body as JSON of `model`, written again without what says nothing; or pydantic's first complaint.

    Rows of training data go into files of `folder`, and an empty row stands for them; of ids, the last `truncate` stay.
    """
    from pydantic import ValidationError

    from fp8serve.server.faults import Fault
    from fp8serve.server.parsing.sizes import ROWS, Sizes, check_keys

    module, name = head["model"].split(":")
    model = getattr(importlib.import_module(module), name)
    try:
        checked = model.model_validate(json.loads(body))
    except (ValueError, RecursionError) as error:
        return {"complaint": _complaint(error) if isinstance(error, ValidationError) else NOT_JSON}, b""
    try:
        Sizes(**head["sizes"]).check(checked)
        if not model.model_fields.keys().isdisjoint(ROWS):
            check_keys(body)
    except Fault as fault:
        return {
            "fault": {"message": fault.message, "param": fault.param, "hint": fault.hint},
            "code": fault.code.value,
        }, b""
    plain = checked.model_dump(exclude_unset=True, by_alias=True)
    if (cut := plain.get("parameters", {}).get("truncate")) and "input_ids" in plain:
        plain["input_ids"] = plain["input_ids"][-cut:]
    for name in ROWS:
        if isinstance(plain.get(name), list):
            _write_rows(head, name, plain[name])
            plain[name] = [{}]
    return {}, json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode()


def _write_rows(head: Head, name: str, rows: list[Any]) -> None:
    from fp8serve.server.parsing.sizes import write_rows

    folder = Path(head["folder"])
    folder.mkdir(mode=0o700, exist_ok=True)
    write_rows(folder / f"{name}.jsonl", rows, head["rows"], head["row_bytes"])


NOT_JSON = {"type": "json_invalid", "loc": ["body"], "msg": "JSON decode error"}


def _complaint(error: Any) -> Head:
    first = error.errors(include_url=False, include_input=False)[0]
    context = {k: v if isinstance(v, int | float | str) else str(v) for k, v in first.get("ctx", {}).items()}
    return {"type": first["type"], "loc": ["body", *first["loc"]], "msg": first["msg"], "ctx": context}


def _dry_run(head: Head, body: bytes) -> Answer:
    from fp8serve.train.config import TrainConfig
    from fp8serve.train.validate import look_at_data

    return {}, look_at_data(TrainConfig.from_json(body.decode())).to_json().encode()


def _rows(head: Head, body: bytes) -> Answer:
    from fp8serve.train.config import TrainConfig
    from fp8serve.train.validate import read_files

    request = json.loads(body)
    read_files(TrainConfig.from_json(request["config"]), request["files"])
    return {}, b""


def _some_rows(head: Head, body: bytes) -> Answer:
    from fp8serve.train.config import TrainConfig
    from fp8serve.train.validate import some_rows

    request = json.loads(body)
    rows = some_rows(TrainConfig.from_json(request["config"]), request["files"], request["most"])
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
    "form": _form,
    "check": _check,
    "dry_run": _dry_run,
    "rows": _rows,
    "some_rows": _some_rows,
}


def _prepare(head: Head) -> None:
    if "directory" in head:
        _tokenizer(head["directory"])  # reading it is no part of the job


def main(form: logs.LogFormat = "plain") -> int:
    logs.configure(form, "parser")
    serve(JOBS, _prepare)
    return 0


if __name__ == "__main__":
    sys.exit(main("json" if sys.argv[1:] == ["json"] else "plain"))
