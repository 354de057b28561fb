"""Runs a function in a group of processes on this machine, with torch's elastic launcher.

    run_group(2, "fp8serve.train.job_process:run_rank", ["JOB_DIR"])

Each process calls the function as a rank (`fp8serve.ranks`). If a process crashes or is killed, the other ones end, and
the group restarts up to MAX_RESTARTS times. The function must therefore resume from files on the disk. The launcher
would treat any exit status except 0 as a crash, so rank 0 writes the function's return value to a file. Signals to this
process are forwarded to all ranks, which then have time to write a checkpoint. If this process is killed, the kernel
kills the ranks, too.
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
STOP_SECONDS = 600  # after a signal, for the current step and a checkpoint; then ranks are killed
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_group(count: int, function: str, arguments: Sequence[str]) -> int | None:
    """Runs `function` ("module:name") with `arguments` in `count` processes, and returns rank 0's return value.

    Returns None if a signal ended the group before rank 0 returned. Raises GroupError if the processes die after the
    last restart.
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
            first_line = error.failures[min(error.failures)].message.splitlines()[0]
            raise GroupError(
                f"A process of the group died {MAX_RESTARTS + 1} times ({first_line}); run the same command again to "
                "resume from the last checkpoint."
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
    """Suppresses the launcher's warnings about forwarded signals. Each of its modules has a logger with a level."""
    for name in [name for name in logging.root.manager.loggerDict if name.startswith(package)]:
        logging.getLogger(name).setLevel(logging.ERROR)


def _share_cores(count: int) -> None:
    """Divides the cores among the processes, and makes gloo use the loopback interface."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def main(arguments: list[str]) -> int:
    """Runs a rank with the arguments PARENT_PID STATUS_FILE FUNCTION ARGUMENT... Returns the exit status."""
    parent_pid, status_file, function, *function_arguments = arguments
    _die_with_parent(int(parent_pid))
    try:
        status = resolve_name(function)(function_arguments)
    except SystemExit as exit_:  # `torchrun` raises it on ranks other than 0, because rank 0 reports the error
        status = exit_.code
    except Exception as error:
        from fp8serve.ranks import is_peer_lost  # here, because it imports torch

        if is_peer_lost(error):
            print("fp8serve: this process ends because another process of the group has ended.", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1
    if os.environ["RANK"] == "0":
        Path(status_file).write_text(str(status))
    return 0


def _die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when its parent ends. Ends this process if the parent has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        end_process(1)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
