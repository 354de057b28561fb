"""Saves the scales that follow the traffic: a new directory beside the model, written by a process of its own.

The engine writes its scales, which is quick, to a file that nobody else reads; then the process copies the weights and
puts the directory in place, whole or not at all (model/rewriting.py). It goes on if its client, or this server, goes
away.
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
from fp8serve.server.serving.served import Served
from fp8serve.server.serving.served_model import ServedModel

log = logging.getLogger("fp8serve.server")
COMMAND = module_command("fp8serve.model.rewriting")


class RolledScales:
    """Saves one directory at a time. `work`: the folder of the file that passes between the two processes."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._saving = asyncio.Lock()

    async def save(self, model: ServedModel, name: str | None) -> tuple[str, int]:
        """Writes what `model` serves, with its scales as they are now, beside the directory that it was first made of;
        returns the new directory's name, and how many scales follow the traffic. Fault: none does, or the directory
        exists or cannot be written.
        """
        served, home = model.resolve(), model.home.directory.resolve()
        out = home.parent / (name or f"{home.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
        if self._saving.locked():
            raise Fault(Code.ALIAS_BUSY, "Scales are being saved already.", hint="Try again when that is done.")
        async with self._saving:
            with tempfile.TemporaryDirectory(prefix="rolled-", dir=self._work) as folder:
                moved = Path(folder) / "moved.safetensors"
                count = await self._moved(served, moved)
                await self._write(served, out, moved)
        log.info("saved %d scales as they are now, with their weights, to %s", count, out)
        return out.name, count

    async def _moved(self, served: Served, path: Path) -> int:
        try:
            return await served.engine.save_scales(path)
        except RequestError as error:
            raise Fault(Code.NOT_ROLLING, str(error)) from None
        except Fp8ServeError as error:
            raise Fault(Code.ENGINE_DOWN, f"The engine did not answer: {error}") from None

    async def _write(self, served: Served, out: Path, moved: Path) -> None:
        source = served.source
        scales = [] if source.options.scales is None else ["--scales", source.options.scales]
        process = await asyncio.create_subprocess_exec(
            *COMMAND, str(source.directory), str(out), str(moved), *scales, stdin=DEVNULL, stdout=PIPE,
            start_new_session=True,
        )  # fmt: skip
        output, _ = await process.communicate()
        if process.returncode:
            raise _fault(output.decode(errors="replace").strip().splitlines())


def _fault(lines: list[str]) -> Fault:
    """The process's error as a fault."""
    try:
        answer = json.loads(lines[-1])
        error, message = str(answer["error"]), str(answer["message"])
    except (IndexError, ValueError, TypeError, KeyError):
        return Fault(Code.INTERNAL, "The process that saves scales failed; the server's log says how.")
    if error == MachineError.__name__:
        return Fault(Code.DISK_FULL, message, hint="Check permissions and quota of the model's parent directory.")
    return Fault(Code.NAME_TAKEN if error == TakenError.__name__ else Code.NOT_ROLLING, message)
