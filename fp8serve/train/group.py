"""Several processes of this machine that do one piece of work together, started by torch's elastic launcher.

    run_group(2, "fp8serve.train.job_process:as_rank", ["JOB_DIR"])

Each calls that function as a rank (`fp8serve.ranks`). When one of them crashes or is killed, the others end and the
group starts again, MAX_RESTARTS times: the work must continue from its files on the disk. A function that returns has
reported its result, even if that is an error. The launcher would take any exit status but 0 for a crash, so rank 0
writes the function's status to a file. A signal to this process reaches all ranks, and they have time to write a
checkpoint. If this process is killed, they die with it.
"""

import ctypes
import logging
import os
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from fp8serve.errors import GroupError
from fp8serve.processes import end_process, module_command

MAX_RESTARTS = 3
STOP_SECONDS = 600  # for the current step and a checkpoint; ranks that take longer are killed
PEER_LOST = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
"""torch's messages when an exchange fails because the other process is gone: not a fault of this one."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_group(count: int, function: str, arguments: Sequence[str]) -> int | None:
    """The result of `function` ("module:name", of a list of strings) on rank 0; None: a signal came before it returned.

    Raises GroupError when the processes die more often than they are restarted.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _share_cores(count)
    _only_log_errors("torch.distributed.elastic")
    with tempfile.TemporaryDirectory(prefix="fp8serve-") as folder:
        status = Path(folder) / "status"
        rank = module_command("fp8serve.train.group", str(os.getpid()), str(status), function, *arguments)
        try:
            elastic_launch(_launch_config(count, folder), rank[0])(*rank[1:])
        except SignalException:
            pass
        except ChildFailedError as error:
            how = error.failures[min(error.failures)].message.splitlines()[0]
            raise GroupError(
                f"A process of the group died {MAX_RESTARTS + 1} times ({how}); the same command again goes on from "
                "the last checkpoint."
            ) from None
        return int(status.read_text()) if status.exists() else None


def _launch_config(count: int, folder: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        max_restarts=MAX_RESTARTS,
        signals_to_handle="SIGTERM,SIGINT",
        shutdown_timeout=STOP_SECONDS,
    )


def _only_log_errors(package: str) -> None:
    """The launcher warns of every signal that it passes on, and each of its modules has a level of its own."""
    for name in [name for name in logging.root.manager.loggerDict if name.startswith(package)]:
        logging.getLogger(name).setLevel(logging.ERROR)


def _share_cores(count: int) -> None:
    """Gives each process as many threads as its share of the cores, and lets them find each other on this machine."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def main(arguments: list[str]) -> int:
    """A rank: PARENT STATUS_FILE FUNCTION ARGUMENT..."""
    parent, status_file, function, *rest = arguments
    _die_with(int(parent))
    try:
        status = resolve_name(function)(rest)
    except SystemExit as end:  # raised by a rank that leaves the message to rank 0
        status = end.code
    except Exception as error:
        if any(words in str(error) for words in PEER_LOST):
            print("fp8serve: another process of the group ended, and this one does, too.", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1
    if os.environ["RANK"] == "0":
        Path(status_file).write_text(str(status))
    return 0


def _die_with(parent: int) -> None:
    """Has this process killed when the one that started it ends, or at once if that has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        end_process(1)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
