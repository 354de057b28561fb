"""A rank other than 0 of an engine with `tensor_parallel` (rank_group.py): `python -m fp8serve.engine.follower`.

It loads its part of the model and then does what rank 0 sends, until rank 0 ends. Signals that also reach rank 0 are
ignored, because rank 0 finishes the requests in flight and needs the other ranks for that.
"""

import argparse
import contextlib
import logging
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, get_args

import torch
import torch.distributed as dist

from fp8serve import logs
from fp8serve.engine.leader import read_together
from fp8serve.engine.loading import LoadedModel, load
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.rank_group import Op, RankGroup
from fp8serve.engine.rank_processes import join_started_by_engine
from fp8serve.engine.step import unpack
from fp8serve.errors import Fp8ServeError
from fp8serve.processes import end_process
from fp8serve.ranks import is_peer_lost


def follow(group: RankGroup, model_dir: Path, options: EngineOptions) -> NoReturn:
    """Loads this rank's part of a model and runs what rank 0 sends. Ends the process when rank 0 has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("fp8serve").setLevel(logging.ERROR)  # rank 0 logs the notes about the model
    try:
        loaded = load(model_dir, replace(options, draft_model=None), group=group)
        _run(group, loaded)
    except Fp8ServeError as error:
        group.report(error)
    except Exception as error:
        if not is_peer_lost(error):
            traceback.print_exc()
    end_process(1)


@torch.inference_mode()
def _run(group: RankGroup, loaded: LoadedModel) -> NoReturn:
    runner, hidden = loaded.runner, torch.empty(0)
    while True:
        op, values = group.receive()
        match op:
            case Op.STEP | Op.STEP_AND_LOGITS:
                hidden = runner.run_step(unpack(values, runner.device))
                if op is Op.STEP_AND_LOGITS:
                    runner.model.logits(hidden)
            case Op.LOGITS:
                rows = hidden.new_empty(int(values[0]), hidden.shape[1])
                dist.broadcast(rows, 0)
                runner.model.logits(rows)
            case Op.READ_ADAPTER:
                path = Path(values.to(torch.uint8).numpy().tobytes().decode())
                with contextlib.suppress(Fp8ServeError):  # rank 0 reports it
                    read_together(group.ranks, runner.adapters, "", path)
            case Op.FREE_ADAPTER:
                runner.adapters.free_number(int(values[0]))
            case Op.COLLECT_COUNTERS:
                loaded.scale_monitor.counters.move_to_first(is_first=False)
            case Op.PACK:
                loaded.packer.pack_next()
            case Op.END:
                group.close()
                end_process(0)


def main(arguments: list[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m fp8serve.engine.follower", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--options", required=True, help="EngineOptions as JSON")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--lost-seconds", type=float, required=True, help="after which a silent rank 0 is lost")
    parser.add_argument("--store", required=True, help="HOST:PORT of rank 0's store")
    parser.add_argument("--log-format", choices=get_args(logs.LogFormat), default="plain")
    parsed = parser.parse_args(arguments)
    logs.configure(parsed.log_format, f"engine rank {parsed.rank}")
    try:
        options = EngineOptions.from_json(parsed.options)
        address = parsed.store, parsed.lost_seconds
        group, options = join_started_by_engine(parsed.model, options, parsed.rank, *address)
    except Fp8ServeError as error:
        print(f"fp8serve: {error}", file=sys.stderr)
        end_process(1)
    follow(group, parsed.model, options)


if __name__ == "__main__":
    main()
