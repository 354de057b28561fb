"""Saves the rolling scales of a served model: a new model directory beside the original one.

The engine process writes its current scales to a private file, which takes little time. Another process then copies the
weights and publishes the new directory atomically (model/format_conversion.py). That process continues even if the
client disconnects or this server ends.
"""

import asyncio
import json
import logging
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

from fp8serve.errors import Fp8ServeError, MachineError, RequestError, TakenError
from fp8serve.processes import module_command
from fp8serve.server.faults import Code, Fault
from fp8serve.server.serving.served_model import ServedModel
from fp8serve.server.serving.served_weights import ServedWeights

log = logging.getLogger("fp8serve.server")
COMMAND = module_command("fp8serve.model.format_conversion")


class ScaleSaver:
    """Saves one directory at a time. `work_dir` holds the file that passes between the two processes."""

    def __init__(self, work_dir: Path) -> None:
        self._work_dir = work_dir
        self._lock = asyncio.Lock()

    async def save(self, model: ServedModel, name: str | None) -> tuple[str, int]:
        """Saves the served weights with their current scales beside the model's original directory.

        Returns the name of the new directory and the number of rolling scales. Raises Fault if the model has no rolling
        scale, or the directory exists or cannot be written.
        """
        served, original = model.resolve(), model.base_source.directory.resolve()
        out = original.parent / (name or f"{original.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
        if self._lock.locked():
            raise Fault(Code.ALIAS_BUSY, "Scales are already being saved.", hint="Try again when they are saved.")
        async with self._lock:
            with tempfile.TemporaryDirectory(prefix="rolled-", dir=self._work_dir) as folder:
                scales_path = Path(folder) / "moved.safetensors"
                try:
                    count = await served.engine.save_scales(scales_path)
                except RequestError as error:
                    raise Fault(Code.NOT_ROLLING, str(error)) from None
                except Fp8ServeError as error:
                    raise Fault(Code.ENGINE_DOWN, f"The engine could not save its scales: {error}") from None
                await self._write_directory(served, out, scales_path)
        log.info("saved the model with %d current scales to %s", count, out)
        return out.name, count

    async def _write_directory(self, served: ServedWeights, out: Path, scales_path: Path) -> None:
        source = served.source
        scales = [] if source.options.scales is None else ["--scales", source.options.scales]
        process = await asyncio.create_subprocess_exec(
            *COMMAND, str(source.directory), str(out), str(scales_path), *scales, stdin=DEVNULL, stdout=PIPE,
            start_new_session=True,
        )  # fmt: skip
        output, _ = await process.communicate()
        if process.returncode:
            raise _fault_from_output(output.decode(errors="replace").strip().splitlines())


def _fault_from_output(lines: list[str]) -> Fault:
    try:
        answer = json.loads(lines[-1])
        error, message = str(answer["error"]), str(answer["message"])
    except (IndexError, ValueError, TypeError, KeyError):
        return Fault(Code.INTERNAL, "The process that saves scales failed; see the server's log.")
    if error == MachineError.__name__:
        return Fault(Code.DISK_FULL, message, hint="Check permissions and quota of the model's parent directory.")
    return Fault(Code.NAME_TAKEN if error == TakenError.__name__ else Code.NOT_ROLLING, message)
