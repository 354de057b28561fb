"""The manifests of the chart agree with each other and with the programs that they start."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import typer
import yaml

import fp8serve
from fp8serve.cli import app as command_line
from fp8serve.cli import main
from fp8serve.server.settings import KEY_VARIABLE, Settings

from .chart import CHART, HELM, JOB, Manifest, container_of, helm_template, needs_helm, of_kind, pod_templates, render

pytestmark = needs_helm
PAGE, KEEP = CHART.parents[2] / "docs/kubernetes.md", "--reset-then-reuse-values"
DATABASE = "postgresql://fp8serve@db.internal/fp8serve"
VARIANTS: dict[str, dict[str, Any]] = {
    "server": {},
    "trains": {"trainOn": "share"},
    "on GPUs": {"gpus": 2, "pod": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}},
    "replicas": {"replicas": 3, "trainOn": "pause", "database": DATABASE, "volume": {"size": "9Gi"}},
    "pool": {"replicas": 2, "endpointPicker": "epp", "labels": {"llm-d.ai/model": "llama"}},
    "open pool": {"secret": "", "endpointPicker": "epp", "options": ["--kv-cache-dtype=fp8"]},
    "nodes": {"nodes": 2, "replicas": 2, "endpointPicker": "epp"},
    "nodes with GPUs": {"nodes": 2, "gpus": 8, "secret": ""},
    "kserve": {"run": "kserve", "env": [{"name": "NCCL_DEBUG", "value": "WARN"}]},
    "job": {"run": "job", "command": JOB},
    "job on GPUs": {"run": "job", "command": JOB, "gpus": 4},
    "job on nodes": {"run": "job", "command": JOB, "nodes": 2},
}
KINDS = {
    "server": ["Deployment", "PodDisruptionBudget", "Service"],
    "replicas": ["Deployment", "PersistentVolumeClaim", "PodDisruptionBudget", "Service"],
    "pool": ["Deployment", "InferencePool", "PodDisruptionBudget", "Service"],
    "nodes": ["InferencePool", "LeaderWorkerSet", "PodDisruptionBudget", "Service"],
    "kserve": ["LLMInferenceService"],
    "job": ["Job"],
    "job on nodes": ["JobSet"],
}
# Variables that fp8serve, libpq and torch read.
VARIABLES = {KEY_VARIABLE, "PGPASSWORD", "OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def pods(manifests: list[Manifest]) -> list[Manifest]:
    return [pod for manifest in manifests for pod in pod_templates(manifest)]


def options_of(command: str) -> set[str]:
    group: Any = typer.main.get_command(command_line)
    return {name for parameter in group.commands[command].params for name in parameter.opts}


def selects(selector: dict[str, str], pod: Manifest) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize("variant", KINDS)
def test_a_release_makes_these_kinds(variant: str) -> None:
    manifests = render(**VARIANTS[variant])
    assert sorted(manifest["kind"] for manifest in manifests) == KINDS[variant]
    names = {m["metadata"]["name"] for m in manifests if m["kind"] != "PersistentVolumeClaim"}
    assert names == {"chat"}


@every_variant
def test_containers_run_commands_and_options_that_exist(variant: str) -> None:
    for pod in pods(render(**VARIANTS[variant])):
        container = container_of(pod)
        command, *arguments = container["args"]
        flags = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        assert flags <= options_of(command)
        assert {entry["name"] for entry in container.get("env", ())} <= VARIABLES | {"NCCL_DEBUG"}
        assert [word for word in container["command"] if word.startswith("-") is False][-1] == "fp8serve"


@pytest.mark.parametrize("variant", ["nodes", "nodes with GPUs", "job on GPUs", "job on nodes"])
def test_torchrun_starts_as_many_ranks_as_the_server_has(variant: str) -> None:
    from torch.distributed.run import get_args_parser

    values = VARIANTS[variant]
    for pod in pods(render(**values)):
        container = container_of(pod)
        program, *words = container["command"]
        words = [re.sub(r"\$\((LWS_WORKER|JOB_COMPLETION)_INDEX\)", "1", word) for word in words]
        parsed = get_args_parser().parse_args([*words, *container["args"]])
        assert (program, parsed.module, parsed.training_script) == ("torchrun", True, "fp8serve")
        assert (int(parsed.nnodes.partition(":")[0]), int(parsed.nproc_per_node)) == (
            values.get("nodes", 1),
            values.get("gpus") or 1,
        )
        if values.get("nodes", 1) > 1:  # the names that JobSet and LeaderWorkerSet give
            assert parsed.node_rank == 1
            assert parsed.master_addr in ("chat-node-0-0.chat", "$(LWS_LEADER_ADDRESS)")
        ranks = int(parsed.nproc_per_node) * values.get("nodes", 1)
        is_server = container["args"][0] == "serve"
        assert not is_server or f"--tensor-parallel={ranks}" in container["args"]


def routes() -> set[str]:
    from fastapi.routing import APIRoute

    from fp8serve.server.api.native import status_routes

    return {route.path for route in status_routes.router.routes if isinstance(route, APIRoute)}


@pytest.mark.parametrize("variant", [name for name, values in VARIANTS.items() if values.get("run") != "job"])
def test_probes_services_and_pools_reach_the_server(variant: str) -> None:
    manifests = render(**VARIANTS[variant])
    first, *others = pods(manifests)
    container = container_of(first)
    assert "--port=8000" in container["args"]
    assert [port["containerPort"] for port in container["ports"]] == [8000]
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {(probe["port"], probe["scheme"]) for probe in probes.values()} == {(8000, "HTTP")}
    assert {probe["path"] for probe in probes.values()} <= routes()
    # A server that loads, or whose job pauses it, is not ready, and must not be ended for that.
    assert probes["startupProbe"]["path"] == probes["livenessProbe"]["path"] == "/health/live"
    assert probes["readinessProbe"]["path"] == "/health/ready"
    for worker in others:
        assert not {"ports", *probes} & set(container_of(worker))
    for manifest in manifests:
        spec = manifest["spec"]
        match manifest["kind"]:
            case "Deployment":
                assert selects(spec["selector"]["matchLabels"], first)
            case "Service":
                assert [port["targetPort"] for port in spec["ports"]] == [8000]
                assert [selects(spec["selector"], pod) for pod in (first, *others)] == [True, *(False for _ in others)]
            case "InferencePool":
                selector = spec["selector"]["matchLabels"]
                assert spec["targetPorts"] == [{"number": 8000}]
                assert [selects(selector, pod) for pod in (first, *others)] == [True, *(False for _ in others)]
                assert "--vllm-metrics" in container["args"]
            case "PodDisruptionBudget":
                assert all(selects(spec["selector"]["matchLabels"], pod) for pod in (first, *others))


@every_variant
def test_a_pod_ends_within_its_grace_period(variant: str) -> None:
    for pod in pods(render(**VARIANTS[variant] | {"drainSeconds": 1_000_000})):
        container = container_of(pod)
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        is_server = container["args"][0] == "serve"
        assert is_server == (container.get("lifecycle") == {"preStop": {"exec": {"command": ["sleep", "5"]}}})
        drain = next((int(w.partition("=")[2]) for w in container["args"] if w.startswith("--drain-seconds")), 600)
        variables = {entry["name"]: entry.get("value") for entry in container.get("env", ())}
        torchrun = int(variables.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", drain))
        assert drain in (1_000_000, 600)
        assert drain <= torchrun < grace - 5 * is_server
        assert (torchrun > drain) == (container["command"][0] == "torchrun")


@every_variant
def test_pods_are_locked_down_and_mount_what_they_declare(variant: str) -> None:
    manifests = render(**VARIANTS[variant])
    for pod in pods(manifests):
        container, spec = container_of(pod), pod["spec"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
        assert list(claims(spec)) == ["fp8serve"]
        gpus = VARIANTS[variant].get("gpus", 0)
        assert container["resources"].get("limits", {}).get("nvidia.com/gpu", "0") == str(gpus)


def claims(spec: dict[str, Any]) -> Iterator[str]:
    for volume in spec["volumes"]:
        if "persistentVolumeClaim" in volume:
            yield volume["persistentVolumeClaim"]["claimName"]


def test_values_add_labels_fields_and_variables() -> None:
    deployment = of_kind(render(**VARIANTS["pool"]), "Deployment")
    assert deployment["metadata"]["labels"]["llm-d.ai/model"] == "llama"
    assert deployment["spec"]["template"]["metadata"]["labels"]["llm-d.ai/model"] == "llama"
    (pod,) = pods(render(**VARIANTS["on GPUs"]))
    assert pod["spec"]["tolerations"] == VARIANTS["on GPUs"]["pod"]["tolerations"]
    assert {"--device=cuda", "--tensor-parallel=2"} <= set(container_of(pod)["args"])
    (kserve,) = render(**VARIANTS["kserve"])
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in kserve["spec"]["template"]["containers"][0]["env"]
    assert kserve["spec"]["model"]["uri"] == "pvc://fp8serve/model"


@every_variant
def test_values_add_volumes_and_containers_and_replace_variables(variant: str) -> None:
    values = VARIANTS[variant]
    extra = {"volumes": [{"name": "cache", "emptyDir": {}}], "containers": [{"name": "proxy", "image": "proxy"}]}
    for before, after in zip(pods(render(**values)), pods(render(**values | {"pod": extra})), strict=True):
        for name, entries in extra.items():
            assert after["spec"][name] == before["spec"][name] + entries
    env = [{"name": name, "value": "mine"} for name in sorted(VARIABLES)]
    for pod in pods(render(**values | {"env": env})):
        assert container_of(pod)["env"] == env


def test_a_server_keeps_jobs_on_the_volume_and_nothing_otherwise() -> None:
    """Pods of one Deployment may share a data directory only with a database."""
    shared = "/data/server/chat"  # two releases may have one claim
    for variant, directory in (("server", "/tmp/server"), ("trains", shared), ("replicas", shared)):
        manifests = render(**VARIANTS[variant])
        assert f"--data-dir={directory}" in container_of(pods(manifests)[0])["args"]
        strategy = of_kind(manifests, "Deployment")["spec"].get("strategy")
        assert strategy == ({"type": "Recreate"} if variant == "trains" else None)


def test_a_volume_of_one_node_leaves_it_before_another_pod_mounts_it() -> None:
    for values, mode in (({}, "ReadWriteMany"), ({"accessMode": "ReadWriteOnce"}, "ReadWriteOnce")):
        manifests = render(volume={"size": "9Gi"} | values)
        assert of_kind(manifests, "PersistentVolumeClaim")["spec"]["accessModes"] == [mode]
        strategy = of_kind(manifests, "Deployment")["spec"].get("strategy")
        assert strategy == ({"type": "Recreate"} if mode == "ReadWriteOnce" else None)


def test_a_job_is_not_tried_again_if_its_command_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    rules = of_kind(render(**VARIANTS["job"]), "Job")["spec"]["podFailurePolicy"]["rules"]
    assert [rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailJob"] == [[2]]
    assert main([*JOB, "--no-such-option"]) == 2
    assert main(["inspect", "/no/such/model"]) == 1


def test_a_rollout_waits_until_a_model_is_loaded() -> None:
    deadline = of_kind(render(), "Deployment")["spec"]["progressDeadlineSeconds"]
    assert deadline > Settings.__dataclass_fields__["load_seconds"].default


@pytest.mark.parametrize("run", ["server", "kserve"])
@pytest.mark.parametrize("text", ["a #2", "a: b", "a: [", "123", "true", '"', "\\n"])
def test_strings_reach_the_manifests_as_they_are(text: str, run: str) -> None:
    values = {"run": run, "name": text, "model": f"/data/{text}", "secret": text, "database": f"postgresql://h/{text}"}
    values |= {"volume": {"claim": text, "storageClass": text, "size": "1"}, "image": text}
    manifests = render(**values | ({"endpointPicker": text} if run == "server" else {}))
    (pod,) = pods(manifests)
    container = container_of(pod)
    assert container["image"] == text
    model = f"/data/{text}" if run == "server" else "/mnt/models"
    assert {model, f"--served-model-name={text}", f"--database=postgresql://h/{text}"} <= set(container["args"])
    assert {entry["valueFrom"]["secretKeyRef"]["name"] for entry in container["env"]} == {text}
    assert list(claims(pod["spec"])) == [text]
    claim = of_kind(manifests, "PersistentVolumeClaim")
    assert (claim["metadata"]["name"], claim["spec"]["storageClassName"]) == (text, text)
    if run == "server":
        assert of_kind(manifests, "InferencePool")["spec"]["endpointPickerRef"]["name"] == text
    else:
        model = of_kind(manifests, "LLMInferenceService")["spec"]["model"]
        assert model == {"name": text, "uri": f"pvc://{text}/{text}"}


@pytest.mark.parametrize("variant", ["pool", "nodes", "kserve", "job", "job on nodes"])
def test_a_release_may_be_named_by_a_number(variant: str) -> None:
    manifests = render(release="123", **VARIANTS[variant])
    for manifest in manifests:
        labels = [manifest["metadata"]["labels"], *(pod["metadata"]["labels"] for pod in pod_templates(manifest))]
        assert manifest["metadata"]["name"] == "123"
        assert {label["app.kubernetes.io/instance"] for label in labels if label} == {"123"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replica": 2}, "additional properties 'replica' not allowed"),
        ({"labels": {"app.kubernetes.io/instance": "x"}}, "labels must not have app.kubernetes.io/instance"),
        ({"labels": {"app.kubernetes.io/component": "x"}}, "labels must not have app.kubernetes.io/component"),
        ({"database": "postgresql://user:PASSWORD@h/n"}, "database must have no password"),
        ({"database": "postgresql://h:5432/n?user=u&password=PASSWORD"}, "database must have no password"),
        ({"nodes": 0}, "minimum: got 0, want 1"),
        ({"model": "model"}, "does not match pattern"),
        ({"options": ["kv-cache-dtype=fp8"]}, "does not match pattern"),
        ({"run": "job"}, "run: job needs command"),
        ({"command": JOB}, "command is for run: job, and run is server."),
        ({"replicas": 2, "trainOn": "share"}, "set database, or replicas to 1."),
        ({"nodes": 2, "trainOn": "share"}, "leave trainOn and database out."),
        ({"nodes": 2, "run": "kserve"}, "run: kserve is for one node"),
        ({"run": "kserve", "trainOn": "share"}, "set database, or leave trainOn out."),
        ({"volume": {"accessMode": "ReadOnlyMany"}}, "value must be one of"),
        ({"run": "kserve", "endpointPicker": "epp"}, "leave endpointPicker out."),
    ],
)
def test_values_that_are_wrong_are_refused(values: dict[str, Any], message: str) -> None:
    result = helm_template(values)
    assert result.returncode != 0
    assert message in result.stderr
    assert "PASSWORD" not in result.stderr


@pytest.mark.parametrize("place", ["h/n", "u@h:5432/n", "[::1]:5432/n", "h1:1,h2:2/n?options=-c%20a@b"])
def test_urls_without_a_password_are_accepted(place: str) -> None:
    (pod,) = pods(render(database=f"postgres://{place}"))
    assert f"--database=postgres://{place}" in container_of(pod)["args"]


def test_the_chart_has_this_version_and_the_defaults_of_the_server() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == fp8serve.__version__
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    defaults = {name: Settings.__dataclass_fields__[name].default for name in ("drain_seconds", "train_on")}
    assert (values["drainSeconds"], values["trainOn"]) == tuple(defaults.values())


def test_commands_of_the_page_are_valid_and_upgrades_keep_values() -> None:
    lines = re.sub(r"\\\n", "", PAGE.read_text()).splitlines()
    commands = [shlex.split(line) for line in lines if re.match(r"helm \w+ \w+ deploy/helm/fp8serve", line)]
    assert {words[1] for words in commands} == {"install", "upgrade"}
    for _, action, release, _, *options in commands:
        assert (KEEP in options) == (action == "upgrade")
        command = [str(HELM), "template", release, str(CHART), *(word for word in options if word != KEEP)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    known = subprocess.run([str(HELM), "upgrade", "--help"], capture_output=True, text=True, check=True)
    assert KEEP in known.stdout


def test_the_page_describes_every_value() -> None:
    page = PAGE.read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert [name for name in values if f"`{name}" not in page] == []
