"""Whether the data of a job can be trained on, by the same code that calibration and the trainer use.

Short files are looked at in a thread of the front, longer ones in a parser process. Only the front asks for the model's
configuration: for one that transformers computes another process tells it, which has no place within a parser's limits.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8serve.errors import DataError
from fp8serve.model.config.decoder import read_config
from fp8serve.model.text.examples import read_examples
from fp8serve.server.faults import Code, Fault, safe_text
from fp8serve.server.parsing.parser_pool import SHORT
from fp8serve.server.parsing.request_parser import RequestParser
from fp8serve.server.schemas.finetune_bodies import FinetuneBody
from fp8serve.train.config import TrainConfig
from fp8serve.train.memory import memory_estimate
from fp8serve.train.validate import look_at_data


async def check_data(parser: RequestParser, body: FinetuneBody, config: TrainConfig, check_files: bool) -> None:
    """Fault 4xx naming the first row that cannot be trained on: rows of `data` are tokenized, files are parsed."""
    if body.data is not None:
        report = await _report(parser, config)
        if report["bad_lines"]:
            raise Fault(Code.INVALID_PARAMETER, report["bad_lines"][0]["message"], param="data")
        if not report["ok"]:
            raise Fault(Code.INVALID_PARAMETER, "No row of data has a token to learn within seq_len.", param="data")
    elif check_files:
        await _check_rows(parser, config.data, "data")
    if check_files:
        await _check_rows(parser, config.eval_data, "validation_data")


async def public_report(parser: RequestParser, config: TrainConfig) -> dict[str, Any]:
    """ValidationReport as plain data, without places on our disk."""
    report = await _report(parser, config)
    bad_lines = [{"line": bad["line"], "message": safe_text(bad["message"])} for bad in report["bad_lines"]]
    memory = await asyncio.to_thread(_memory, config, report)
    return report | {"bad_lines": bad_lines, "memory_bytes": memory}


def _memory(config: TrainConfig, report: dict[str, Any]) -> dict[str, int]:
    model = read_config(config.model)
    return memory_estimate(model, config, report["microbatch_tokens"], report["trainable_fraction"])


async def _check_rows(parser: RequestParser, files: Sequence[str], param: str) -> None:
    try:
        if _is_short(files):
            await asyncio.to_thread(read_examples, [Path(name) for name in files])
        else:
            await parser.look_at_rows("rows", json.dumps(list(files)).encode())
    except DataError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param=param) from None


async def _report(parser: RequestParser, config: TrainConfig) -> dict[str, Any]:
    if _is_short(config.data):
        text = (await asyncio.to_thread(look_at_data, config)).to_json().encode()
    else:
        text = await parser.look_at_rows("dry_run", config.to_json().encode())
    report: dict[str, Any] = json.loads(text)
    return report


def _is_short(files: Sequence[str]) -> bool:
    """Whether the files can be read here."""
    return sum(Path(name).stat().st_size for name in files) <= SHORT
