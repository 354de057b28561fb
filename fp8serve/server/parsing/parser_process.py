"""The process that reads what clients send: `python -m fp8serve.server.parsing.parser_process`, one job at a time.
Its one argument is the form of its log.

Parsing, validating, rendering a template and tokenizing cost as much as a client cares to send, and hold Python's lock;
here they hold nobody else's. A job is a frame on the socket that is this process's standard input (`frames` below), the
answer another one. Before each job the limits that it names are set: processor seconds, after which the kernel ends
this process, and memory beyond what is in use now. Templates are programs that came with a model: this is also their
cage. Nothing is unpickled; this module imports no torch.
"""

import importlib
import json
import logging
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from fp8serve import logs
from fp8serve.errors import Fp8ServeError
from fp8serve.model.storage.heap import address_space
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.server.parsing.texts import Asked, read_text

log = logging.getLogger("fp8serve.server.parsing")

FRAME = struct.Struct("!QQ")  # bytes of the JSON head, bytes of the body behind it
Head = dict[str, Any]
Answer = tuple[Head, bytes]


def pack(head: Head, body: bytes = b"") -> bytes:
    """One frame: a JSON object and some bytes."""
    text = json.dumps(head, separators=(",", ":")).encode()
    return FRAME.pack(len(text), len(body)) + text + body


def _receive(stream: BinaryIO) -> Answer | None:
    sizes = stream.read(FRAME.size)
    if len(sizes) < FRAME.size:
        return None
    head, body = FRAME.unpack(sizes)
    return json.loads(stream.read(head)), stream.read(body)


# -- jobs --------------------------------------------------------------------------------------------------------------


@lru_cache(2)  # what is served, and what is about to be
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
    around = head["around"]
    asked = (Asked(one, None if single else two, most, cut, around) for one, two, (single, most, cut) in pairs)
    return {"pairs": [read_text(tokenizer, each) for each in asked]}, b""


def _chat(head: Head, body: bytes) -> Answer:
    tokenizer = _tokenizer(head["directory"])
    return {"prompts": [_ids(tokenizer, _render(tokenizer, head, body), head | {"special": False})]}, b""


def _count(head: Head, body: bytes) -> Answer:
    tokenizer = _tokenizer(head["directory"])
    text = _render(tokenizer, head | {"prompted": True}, body)
    return {"count": len(tokenizer.encode(text, False))}, b""


def _render(tokenizer: Tokenizer, head: Head, body: bytes) -> str:
    """The template writes BOS itself where the model wants one: its text is encoded without."""
    _allow(head["template_cpu"])
    text = tokenizer.chat(json.loads(body), head["prompted"], head["variables"])
    _allow(head["cpu"])
    return text


def _ids(tokenizer: Tokenizer, text: str, head: Head) -> Head:
    """How many there are, and the last `keep` of them; without them when they are more than `most`."""
    if head["keep"] is None and (least := tokenizer.fewest_tokens(text)) > head["most"]:
        return {"count": least, "exact": False, "ids": []}
    ids = tokenizer.encode(text, head["special"])
    kept = ids[-head["keep"] :] if head["keep"] else ids
    return {"count": len(kept), "exact": True, "ids": kept if len(kept) <= head["most"] else []}


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
    from fp8serve.server.parsing.sizes import Sizes

    module, name = head["model"].split(":")
    try:
        checked = getattr(importlib.import_module(module), name).model_validate(json.loads(body))
    except (ValueError, RecursionError) as error:
        return {"complaint": _complaint(error) if isinstance(error, ValidationError) else NOT_JSON}, b""
    try:
        Sizes(**head["sizes"]).check(checked)
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
    from fp8serve.server.parsing.rows import write_rows

    folder = Path(head["folder"])
    folder.mkdir(mode=0o700, exist_ok=True)
    write_rows(folder / f"{name}.jsonl", rows, head["rows"], head["row_bytes"])


ROWS = ("data", "validation_data")
"""Fields of a request that hold rows of training data."""
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

    asked = json.loads(body)
    read_files(TrainConfig.from_json(asked["config"]), asked["files"])
    return {}, b""


def _some_rows(head: Head, body: bytes) -> Answer:
    from fp8serve.train.config import TrainConfig
    from fp8serve.train.validate import some_rows

    asked = json.loads(body)
    rows = some_rows(TrainConfig.from_json(asked["config"]), asked["files"], asked["most"])
    return {}, json.dumps([[row.ids.tolist(), row.loss.tolist()] for row in rows]).encode()


JOBS: dict[str, Callable[[Head, bytes], Answer]] = {
    "encode": _encode,
    "pairs": _pairs,
    "chat": _chat,
    "count": _count,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
    "form": _form,
    "check": _check,
    "dry_run": _dry_run,
    "rows": _rows,
    "some_rows": _some_rows,
}


# -- limits ------------------------------------------------------------------------------------------------------------


def _limit(head: Head) -> None:
    """From now on the kernel ends this process after `cpu` seconds of work, and refuses it `memory` more bytes."""
    _allow(head["cpu"])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if (used := address_space()) is not None:
        wanted = used + head["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _allow(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)


def perform(head: Head, body: bytes) -> bytes:
    """The answer to one job, an error of ours as its class and sentence."""
    try:
        if "directory" in head:
            _tokenizer(head["directory"])  # reading it is no part of the job
        before = address_space()
        _limit(head)
        answer, content = JOBS[head["op"]](head, body)
        grown = before is not None and (address_space() or 0) - before > head["memory"] // 4
        return pack(answer | ({"last": True} if grown else {}), content)
    except Fp8ServeError as error:
        return pack({"error": type(error).__name__, "message": str(error)})
    except OSError as error:
        return pack({"error": "OSError", "errno": error.errno or 0, "message": error.strerror or str(error)})
    except MemoryError:
        return pack({"too_much": True, "last": True})
    except Exception as error:  # a mistake of ours: the log has it, the front answers 500
        log.exception("a parser process failed")
        return pack({"error": "RuntimeError", "message": f"A parser process failed: {type(error).__name__}."})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(form: logs.LogFormat = "plain") -> int:
    logs.configure(form, "parser")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as connection, connection.makefile("rb") as jobs:
        while (job := _receive(jobs)) is not None:
            connection.sendall(perform(*job))
    return 0


if __name__ == "__main__":
    sys.exit(main("json" if sys.argv[1:] == ["json"] else "plain"))
