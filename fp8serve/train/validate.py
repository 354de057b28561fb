"""Dry runs: check a job's data and estimate its steps and memory, without weights and without torch.

A dry run lists all invalid lines of the data and the validation data with file and line, where a run stops at the first
one. memory.py estimates the memory from sizes.
"""

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fp8serve.errors import DataError
from fp8serve.model.config.decoder import read_config
from fp8serve.model.text.data_files import DataLimits, Rows, read_source
from fp8serve.model.text.examples import require_nonempty
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Item, Row, RowCounts, check_length, epoch_steps, no_trainable_row_error, total_steps
from fp8serve.train.events import check_optimizer_package
from fp8serve.train.memory import check_layers, memory_estimate
from fp8serve.train.methods.interface import Reader, reader_of

MAX_LISTED = 100  # invalid lines in a report
EXAMPLES_PER_BATCH = 64  # examples that are tokenized in one call


@dataclass(frozen=True)
class DataReport:
    """The contents of a job's data.

    `bad_lines` describes the first hundred invalid lines as {"file", "line" (from 1, None for a file), "message"}, and
    `bad_line_count` counts all. `steps` are optimizer steps of the job. `longest_row` and `microbatch_tokens`, the
    largest microbatch, are in tokens. `sample` is the first item as (text, is in the loss mask) pieces.
    """

    ok: bool
    bad_lines: list[dict[str, Any]]
    bad_line_count: int
    data: RowCounts
    trainable_fraction: float
    steps: int
    steps_per_epoch: int
    longest_row: int
    microbatch_tokens: int
    sample: list[tuple[str, bool]]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)


@dataclass(frozen=True)
class ValidationReport(DataReport):
    """The result of a dry run. `memory_bytes` estimates the memory of one process by part."""

    memory_bytes: dict[str, int]


def validate(config: TrainConfig, processes: int = 1) -> ValidationReport:
    """Checks the model's configuration and all data for a run with this number of processes.

    Raises ModelError, RecipeError or JobError. Invalid data are part of the report.
    """
    model = read_config(config.model)
    check_length(config.seq_len, model)
    check_layers(config, model)
    check_optimizer_package(config)
    report = data_report(config)
    memory = memory_estimate(model, config, report.microbatch_tokens, report.trainable_fraction, processes)
    return ValidationReport(**vars(report), memory_bytes=memory)


def read_files(config: TrainConfig, files: Sequence[str]) -> None:
    """Parses files with the reader of the job's method, without tokenizing. Raises DataError for the first error."""
    reader = reader_of(config)
    for path in files:
        deque(reader.read_examples(path, config.data_limits), maxlen=0)


def first_rows(config: TrainConfig, files: Sequence[str], max_tokens: int) -> list[Row]:
    """Returns the first rows of files, at most `max_tokens` tokens in total; of a pair, the row of the chosen
    completion. Skips invalid rows, and reads only as much of the files as necessary."""
    tokenizer, reader = Tokenizer.from_dir(config.model, config.today), reader_of(config)
    rows: list[Row] = []
    for _, _, example in (e for name in files for e in _examples(reader, name, config.data_limits)):
        try:
            items = [] if isinstance(example, DataError) else reader.tokenize([example], tokenizer, config.seq_len)[0]
        except DataError:
            continue
        for row in (item.rows[0] for item in items):
            if sum(r.tokens for r in rows) + row.tokens > max_tokens:
                return rows
            rows.append(row)
    return rows


def data_report(config: TrainConfig) -> DataReport:
    """Checks all data of a job. It does not read the model's configuration."""
    tokenizer = Tokenizer.from_dir(config.model, config.today)
    bad_lines = _BadLines()
    items, counts = _valid_items(config, config.data, tokenizer, bad_lines)
    _valid_items(config, config.eval_data, tokenizer, bad_lines)
    lengths = [item.tokens for item in items]
    microbatch = max((sum(lengths[i] for i in m) for s in epoch_steps(lengths, config, 0) for m in s), default=0)
    return DataReport(
        ok=bool(items) and not bad_lines.count,
        bad_lines=bad_lines.listed,
        bad_line_count=bad_lines.count,
        data=counts,
        trainable_fraction=counts.trainable_fraction,
        steps=total_steps(lengths, config) if items else 0,
        steps_per_epoch=len(epoch_steps(lengths, config, 0)),
        longest_row=max((row.tokens for item in items for row in item.rows), default=0),
        microbatch_tokens=microbatch,
        sample=[piece for item in items[:1] for row in item.rows for piece in _masked_pieces(row, tokenizer)],
    )


class _BadLines:
    """The number of invalid lines, and descriptions of the first MAX_LISTED: a file may have millions."""

    def __init__(self) -> None:
        self.listed: list[dict[str, Any]] = []
        self.count = 0

    def add(self, file: str, line: int | None, error: DataError | str) -> None:
        self.count += 1
        if self.count <= MAX_LISTED:
            self.listed.append({"file": file, "line": line, "message": str(error)})


def _valid_items(
    config: TrainConfig, files: Sequence[str], tokenizer: Tokenizer, bad_lines: _BadLines
) -> tuple[list[Item], RowCounts]:
    """Returns the items of `files`. Adds invalid rows, files without rows, and files without a trainable row to
    `bad_lines`."""
    items: list[Item] = []
    previous_count = bad_lines.count
    reader, totals = reader_of(config), RowCounts(0, 0, 0, 0, 0, 0)
    examples = (e for name in files for e in _examples(reader, name, config.data_limits))
    while batch := list(islice(examples, EXAMPLES_PER_BATCH)):
        for new_items, counts in _tokenized(batch, lambda e: reader.tokenize(e, tokenizer, config.seq_len), bad_lines):
            items += new_items
            totals = RowCounts(*(getattr(totals, name) + getattr(counts, name) for name in _COUNTS))
    if files and not items and bad_lines.count == previous_count:
        bad_lines.add(files[0], None, no_trainable_row_error(reader, totals.examples, files, config.seq_len))
    return items, totals


def _tokenized(
    batch: Sequence["_Example"], tokenize: "_Tokenize", bad_lines: _BadLines
) -> Iterator[tuple[list[Item], RowCounts]]:
    """Yields the items of a batch, tokenized in one call. If an example is invalid, tokenizes them one by one."""
    examples = [example for *_, example in batch]
    problem = next((str(example) for example in examples if isinstance(example, DataError)), "")
    try:
        result = None if problem else tokenize(examples)
    except DataError as error:
        result, problem = None, str(error)
    if result is not None:
        yield result
    elif len(batch) == 1:
        bad_lines.add(*batch[0][:2], problem)
    else:
        for example in batch:
            yield from _tokenized([example], tokenize, bad_lines)


_Tokenize = Callable[[list[Any]], tuple[list[Item], RowCounts]]
_COUNTS = [field.name for field in dataclasses.fields(RowCounts)]
_Example = tuple[str, int | None, Any]


def _examples(reader: Reader[Any, Any], argument: str, limits: DataLimits) -> Iterator[_Example]:
    """Yields (file, line, example). An invalid row and a file that cannot be read yield a DataError as the example."""
    try:
        source = read_source(argument, reader.columns, limits)
        if isinstance(source, Rows):
            rows = ((argument, number, _parse(reader, row, f"{argument}:{number}")) for number, row in source.rows)
            yield from require_nonempty(rows, argument)
        else:
            yield from ((argument, None, example) for example in reader.read_examples(argument, limits))
    except DataError as error:
        yield argument, None, error


def _parse(reader: Reader[Any, Any], row: str | Mapping[str, Any], where: str) -> Any:
    try:
        return reader.parse_row(row, where)
    except DataError as error:
        return error


def _masked_pieces(row: Row, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Returns the row's text in pieces, each with whether it is in the loss mask."""
    pieces: list[tuple[list[int], bool]] = []
    for token, has_loss in zip(row.ids.tolist(), row.loss.tolist(), strict=True):
        if not pieces or pieces[-1][1] != has_loss:
            pieces.append(([], has_loss))
        pieces[-1][0].append(token)
    return [(tokenizer.decode(ids, skip_special_tokens=False), has_loss) for ids, has_loss in pieces]
