"""Checks whether a job can train on its data, with the same code that calibration and the trainer use.

A parser process tokenizes rows, and parses long files; short ones are parsed in a thread of the front. Only the front
asks for the model's configuration: if transformers computes the model, reading it takes a further process, which a
parser's limits forbid.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8serve.errors import DataError, Fp8ServeError
from fp8serve.model.config.decoder import read_config
from fp8serve.model.text.data_files import is_lines
from fp8serve.server.faults import Code, Fault, safe_text
from fp8serve.server.parsing.parser_pool import SHORT
from fp8serve.server.parsing.request_parser import RequestParser
from fp8serve.server.schemas.finetune_bodies import FinetuneBody
from fp8serve.server.serving.verification import MeasuredRow
from fp8serve.train.config import TrainConfig
from fp8serve.train.memory import memory_estimate
from fp8serve.train.validate import read_files

log = logging.getLogger("fp8serve.server")

MEASURED_TOKENS = 2048


async def check_data(parser: RequestParser, body: FinetuneBody, config: TrainConfig, check_files: bool) -> None:
    """Fault 4xx naming the first row that cannot be trained on: rows of `data` are tokenized, files are parsed."""
    if body.data is not None:
        report = await _report(parser, config)
        for bad in report["bad_lines"]:
            param = "validation_data" if bad["file"] in config.eval_data else "data"
            raise Fault(Code.INVALID_PARAMETER, bad["message"], param=param)
    elif check_files:
        await _check_rows(parser, config, config.data, "data")
    if check_files:
        await _check_rows(parser, config, config.eval_data, "validation_data")


async def public_report(parser: RequestParser, config: TrainConfig, processes: int) -> dict[str, Any]:
    """ValidationReport as plain data, without paths on the server's disk; memory is that of one of the `processes`."""
    report = await _report(parser, config)
    bad_lines = [{"line": bad["line"], "message": safe_text(bad["message"])} for bad in report["bad_lines"]]
    memory = await asyncio.to_thread(_memory, config, report, processes)
    return report | {"bad_lines": bad_lines, "memory_bytes": memory}


async def measured_rows(parser: RequestParser, config: TrainConfig) -> list[MeasuredRow]:
    """The rows by which a job's result is compared with what serves: its held-out rows, or rows that it learnt if it
    has none; empty if they cannot be read. All tokens of a prompt without an answer count."""
    files = config.eval_data or config.data
    try:
        request = {"config": config.to_json(), "files": list(files), "most": MEASURED_TOKENS}
        rows = json.loads(await parser.look_at_rows("some_rows", json.dumps(request).encode()))
    except (Fp8ServeError, OSError) as error:
        log.warning("the rows of a job cannot be read, so its perplexity is not measured: %s", error)
        return []
    return [MeasuredRow(tuple(ids), tuple(counts if any(counts[1:]) else [True] * len(ids))) for ids, counts in rows]


def _memory(config: TrainConfig, report: dict[str, Any], processes: int) -> dict[str, int]:
    model = read_config(config.model)
    return memory_estimate(model, config, report["microbatch_tokens"], report["trainable_fraction"], processes)


async def _check_rows(parser: RequestParser, config: TrainConfig, files: Sequence[str], param: str) -> None:
    try:
        if _is_short(files):
            await asyncio.to_thread(read_files, config, files)
        else:
            await parser.look_at_rows("rows", json.dumps({"config": config.to_json(), "files": list(files)}).encode())
    except DataError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param=param) from None


async def _report(parser: RequestParser, config: TrainConfig) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(await parser.look_at_rows("dry_run", config.to_json().encode()))
    return report


def _is_short(files: Sequence[str]) -> bool:
    """Whether the files can be parsed here. A compressed file cannot: its few bytes may become many."""
    return all(map(is_lines, files)) and sum(Path(name).stat().st_size for name in files) <= SHORT
