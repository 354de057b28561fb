"""A trainer in its own process: `python -m tests.server.trainer_process JSON` with `url`, `directory`, `parts` (the
number of requests in which the weights are sent) and `dies_after` (the number of broadcasts before SIGKILL, or null).

It speaks SGLang's protocol: it opens the port of a gloo group, posts what it will send, and broadcasts the tensors.
"""

import json
import os
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.engine.trainer import TrainerGroup, infos_of, tensors_in
from tests.patience import PATIENCE


def main(options: dict[str, Any]) -> None:
    name, tensors = "weight_update_group", list(tensors_in(Path(options["directory"])).items())
    group = TrainerGroup(name, "torch")
    with httpx.Client(base_url=options["url"], timeout=PATIENCE) as client, ThreadPoolExecutor() as pool:

        def post(path: str, **body: Any) -> Future[httpx.Response]:
            return pool.submit(client.post, path, json=body)

        address = {"master_address": "127.0.0.1", "master_port": group.port, "rank_offset": 1, "world_size": 2}
        joining = post("/init_weights_update_group", **address, backend="gloo")
        group.connect()
        joining.result().raise_for_status()
        count, size = 0, -(-len(tensors) // options["parts"])
        for start in range(0, len(tensors), size):
            part = dict(tensors[start : start + size])
            names, dtypes, shapes = zip(*infos_of(part), strict=True)
            receiving = post("/update_weights_from_distributed", names=names, dtypes=dtypes, shapes=shapes)
            for tensor in part.values():
                if count == options["dies_after"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                group.broadcast(tensor)
                count += 1
            print(receiving.result().raise_for_status().json()["message"], flush=True)
        post("/destroy_weights_update_group").result().raise_for_status()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
