"""Serves MODEL as a worker of Dynamo until a signal stops it: `python -m fp8serve.integrations.dynamo MODEL`."""

import asyncio
import logging
import math
import os
import signal
import sys
from collections.abc import Sequence

from fp8serve.cli import prepare_environment
from fp8serve.errors import Fp8ServeError, MachineError, one_line

CLEANUP_SECONDS = 15.0  # that a worker may take to end its engine after `drain_seconds`


def main() -> int:
    """Runs a worker with the arguments of this process and returns the exit status."""
    prepare_environment(["serve"])
    try:
        import dynamo.common.backend  # noqa: F401
    except ImportError as error:
        missing = f"{error.name} is not installed" if error.name else str(error)
        return _fail(f"A worker of Dynamo needs ai-dynamo ({missing}): pip install 'fp8serve[dynamo]'.")
    logging.getLogger("fp8serve").setLevel(logging.INFO)
    try:
        asyncio.run(_serve(sys.argv[1:]))
    except Fp8ServeError as error:
        return _fail(str(error))
    return 0


async def _serve(arguments: Sequence[str]) -> None:
    from dynamo.common.backend import Worker

    from fp8serve.integrations.dynamo.engine import DynamoEngine

    engine, config = await DynamoEngine.from_args(arguments)
    seconds = math.ceil(engine.settings.drain_seconds + CLEANUP_SECONDS)  # after which Dynamo ends this process
    os.environ.setdefault("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", str(seconds))
    for number in (signal.SIGTERM, signal.SIGINT):  # Dynamo's own handlers call these first handlers, too
        asyncio.get_running_loop().add_signal_handler(number, engine.end_if_loading)
    try:
        await Worker(engine, config).run()
    except Exception as error:  # of Dynamo, even if `engine.start` has raised one of fp8serve's
        raise engine.problem or MachineError(f"Dynamo's runtime has failed: {one_line(error)}.") from None


def _fail(message: str) -> int:
    print(f"fp8serve: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
