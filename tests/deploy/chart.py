"""Renders the Helm chart, and runs the containers of its pods as processes of this machine."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "fp8serve"
HELM = shutil.which("helm", path=f"{ROOT / 'build' / 'helm'}:{os.environ['PATH']}")
PROGRAMS = {"fp8serve": ("-m", "fp8serve"), "torchrun": ("-m", "torch.distributed.run")}
JOB = ["finetune", "/data/model", "--data=/data/chats.jsonl", "--out=/data/tutor"]
RELEASE = "chat"

needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed (make helm)")
Manifest = dict[str, Any]


def helm_template(values: Mapping[str, Any], release: str = RELEASE) -> subprocess.CompletedProcess[str]:
    """Runs `helm template` with these values."""
    command = [str(HELM), "template", release, str(CHART), "--values", "-"]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)


def render(release: str = RELEASE, **values: Any) -> list[Manifest]:
    """Returns the manifests of a release with these values."""
    result = helm_template(values, release)
    assert result.returncode == 0, result.stderr
    return [document for document in yaml.safe_load_all(result.stdout) if document]


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    (manifest,) = (m for m in manifests if m["kind"] == kind)
    return manifest


def pod_templates(manifest: Manifest) -> list[Manifest]:
    """Returns the pod templates of a workload, the one of the first pod first."""
    spec = manifest["spec"]
    match manifest["kind"]:
        case "Deployment" | "Job":
            return [spec["template"]]
        case "LeaderWorkerSet":
            return [spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
        case "JobSet":
            return [job["template"]["spec"]["template"] for job in spec["replicatedJobs"]]
        case "LLMInferenceService":
            return [{"metadata": {"labels": {}}, "spec": spec["template"]}]
        case _:
            return []


def container_of(pod: Manifest) -> Manifest:
    (container,) = pod["spec"]["containers"]
    return dict(container)


def start(
    pod: Manifest,
    log: Path,
    paths: Mapping[str, Path],
    ports: Mapping[int, int],
    variables: Mapping[str, str],
    secret: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Runs the container of a pod as a process with its command and its environment.

    `paths` maps directories of the container to directories here, and `ports` its ports to free ones. `variables` are
    the environment variables that Kubernetes adds, and `secret` is the content of the Secret.
    """
    container = container_of(pod)
    environment = {"PATH": os.environ["PATH"], "HOME": str(paths["/data"]), "PYTHONPATH": str(ROOT)} | variables
    for entry in container.get("env", ()):
        environment[entry["name"]] = _value(entry, secret)

    def local(word: str) -> str:
        word = re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word)
        word = re.sub(rf"(?<![^=])({'|'.join(paths)})(?=/|$)", lambda match: str(paths[match[1]]), word)
        word = re.sub(r"^(--master-addr=).*", r"\g<1>127.0.0.1", word)  # a name in the cluster's DNS
        return re.sub(r"^(--(?:master-)?port=)(\d+)$", lambda match: f"{match[1]}{ports[int(match[2])]}", word)

    program, *arguments = [*container["command"], *container["args"]]
    command = [sys.executable, *PROGRAMS[program], *map(local, arguments)]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=paths["/data"])


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process with all that it has started, as the end of a container does."""
    pids = [process.pid]
    for pid in pids:
        with contextlib.suppress(OSError):
            pids += [int(p) for path in Path(f"/proc/{pid}/task").glob("*/children") for p in path.read_text().split()]
    for pid in pids if process.poll() is None else pids[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _value(entry: Manifest, secret: Mapping[str, str]) -> str:
    match entry:
        case {"value": value}:
            return str(value)
        case {"valueFrom": {"secretKeyRef": {"key": key}}}:
            return secret[key]
        case {"valueFrom": {"resourceFieldRef": {"resource": "requests.cpu"}}}:
            return "1"
    raise AssertionError(f"{entry} has no value")
