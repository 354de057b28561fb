"""The container files parse, and agree with the application that they start."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8serve.cli import app as command_line

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
YAML_FILES = sorted(DOCKER.rglob("*.yaml"))
ALERTS = ROOT / "tests" / "alerts.yaml"  # example time series, and the alerts that they must raise


def documents(path: Path) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all(path.read_text()) if d]


def instructions(path: Path) -> list[tuple[str, str]]:
    """Returns (instruction, rest) of every line of a Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", path.read_text(), flags=re.M))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def servers() -> list[dict[str, Any]]:
    """Returns the compose services that run fp8serve."""
    return [s for s in documents(DOCKER / "compose.yaml")[0]["services"].values() if "build" in s]


@pytest.fixture(scope="module")
def routes() -> set[str]:
    """Paths of the application's routes for health, status and metrics, and of its pages."""
    from fastapi.routing import APIRoute

    from fp8serve.server.api.native import status_routes
    from fp8serve.server.app import pages

    entries = [*status_routes.router.routes, *pages().routes]
    return {route.path for route in entries if isinstance(route, APIRoute)}


def serve_options() -> set[str]:
    import typer

    group: Any = typer.main.get_command(command_line)
    return {name for parameter in group.commands["serve"].params for name in parameter.opts}


def test_every_yaml_file_parses() -> None:
    assert len(YAML_FILES) >= 5
    for path in YAML_FILES:
        assert documents(path), path


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_images_are_multi_stage_and_run_as_nobody(path: Path) -> None:
    steps = instructions(path)
    assert [name for name, _ in steps].count("FROM") == 2
    final = steps[max(i for i, (name, _) in enumerate(steps) if name == "FROM") :]
    assert ("USER", "10001:10001") in final
    assert ("VOLUME", "/data") in final
    assert any(name == "HEALTHCHECK" for name, _ in final)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_files_that_an_image_copies_exist(path: Path) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name, rest in instructions(path):
        if name == "COPY" and not rest.startswith("--from"):
            sources = set(rest.split()[:-1])
            assert all((ROOT / s).exists() for s in sources), rest
            assert sources <= allowed, f".dockerignore hides {sources - allowed}"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_images_are_built_by_the_targets_that_ci_runs(path: Path) -> None:
    """An image calls no compiler and no pip wheel, and has no package list, so that CI tests all that builds it."""
    built = [rest for name, rest in instructions(path) if name == "RUN" and "apt-get" not in rest]
    targets = [word for rest in built for word in re.findall(r"\bmake (?!&)([\w./]+)", rest)]
    assert targets == [".venv/packages", "wheel"]
    rules = re.findall(r"^([\w./]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert set(targets) <= set(rules)
    assert "make test-wheel" in (ROOT / ".ci/run").read_text()
    assert re.search(r"^test-wheel: wheel\b", (ROOT / "Makefile").read_text(), flags=re.M)
    assert not [rest for rest in built if re.search(r"pip wheel|cmake|nvcc", rest)]
    assert ("FP8SERVE_CUDA=ON" in " ".join(built)) == (path.suffix == ".cuda")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_health_check_requests_a_route_that_exists(path: Path, routes: set[str]) -> None:
    check = next(rest for name, rest in instructions(path) if name == "HEALTHCHECK")
    match = re.search(r"127\.0\.0\.1:8000(/[\w/]+)", check)
    assert match
    assert match[1] in routes


def test_containers_are_locked_down() -> None:
    for service in documents(DOCKER / "compose.yaml")[0]["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_started_commands_are_ones_that_serve_has() -> None:
    for service in servers():
        words = service["command"]
        assert words[0] == "serve"
        assert {w.partition("=")[0] for w in words if w.startswith("--")} <= serve_options()


def test_the_drain_fits_into_the_grace_period() -> None:
    from fp8serve.server.settings import Settings

    drain = Settings.__dataclass_fields__["drain_seconds"].default
    for service in servers():
        assert float(service["stop_grace_period"].removesuffix("s")) > drain


def test_profiles() -> None:
    services = documents(DOCKER / "compose.yaml")[0]["services"]
    assert {p for s in services.values() for p in s["profiles"]} == {"cpu", "gpu", "observability"}
    assert {s["build"]["dockerfile"] for s in servers()} == {f"docker/{p.name}" for p in DOCKERFILES}


def prometheus() -> dict[str, Any]:
    (document,) = documents(DOCKER / "observability/prometheus.yaml")
    return document


def test_prometheus_scrapes_the_metrics_route_of_the_compose_services(routes: set[str]) -> None:
    """tests/server/test_observability.py tests the queries."""
    service = documents(DOCKER / "compose.yaml")[0]["services"]["prometheus"]
    (job,) = prometheus()["scrape_configs"]
    assert job["metrics_path"] in routes
    assert {t for s in job["static_configs"] for t in s["targets"]} == {"cpu:8000", "gpu:8000"}
    mounted = {v.split(":")[1] for v in service["volumes"]}
    assert {*prometheus()["rule_files"], "/etc/prometheus/prometheus.yml"} <= mounted
    assert "--config.file=/etc/prometheus/prometheus.yml" in service["command"]


def test_prometheus_finds_the_key_where_its_container_writes_it(tmp_path: Path) -> None:
    """This machine's shell runs the entrypoint; a script that prints its arguments replaces Prometheus."""
    service = documents(DOCKER / "compose.yaml")[0]["services"]["prometheus"]
    key = prometheus()["scrape_configs"][0]["authorization"]["credentials_file"]
    assert str(Path(key).parent) in service["tmpfs"]
    stand_in = tmp_path / "prometheus"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    words = [word.replace("$$", "$").replace(key, str(tmp_path / "key")) for word in service["entrypoint"]]
    environment = {"PATH": f"{tmp_path}:{os.defpath}", "FP8SERVE_API_KEY": 'a $secret"s'}
    ran = subprocess.run([*words, *service["command"]], env=environment, capture_output=True, text=True, check=True)
    assert (tmp_path / "key").read_text() == 'a $secret"s'
    assert ran.stdout.split() == service["command"]


def test_read_only_containers_mount_their_configurations_from_files() -> None:
    """Compose cannot write an inline configuration or secret into a read-only container; it can only mount files."""
    compose = documents(DOCKER / "compose.yaml")[0]
    for service in compose["services"].values():
        for kind in ("configs", "secrets"):
            for used in service.get(kind, []) if service["read_only"] else []:
                name = used if isinstance(used, str) else used["source"]
                assert "file" in compose[kind][name], name


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool, of Prometheus, is not installed")
def test_prometheus_reads_its_configuration_and_the_alerts(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    shutil.copy(DOCKER / "observability/alerts.yaml", tmp_path)
    text = (DOCKER / "observability/prometheus.yaml").read_text()
    (tmp_path / "prometheus.yml").write_text(
        text.replace("/tmp/key", str(key)).replace("/etc/prometheus", str(tmp_path))
    )
    check = ["promtool", "check", "config", "--lint-fatal", str(tmp_path / "prometheus.yml")]
    ran = subprocess.run(check, capture_output=True, text=True)
    assert (ran.returncode, "rules found" in ran.stdout) == (0, True), ran.stdout + ran.stderr


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool, of Prometheus, is not installed")
def test_every_alert_fires_when_it_should() -> None:
    ran = subprocess.run(["promtool", "test", "rules", str(ALERTS)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    alerts = {case["alertname"] for test in documents(ALERTS)[0]["tests"] for case in test["alert_rule_test"]}
    assert alerts == {
        rule["alert"] for rule in documents(DOCKER / "observability/alerts.yaml")[0]["groups"][0]["rules"]
    }


def test_mounted_files_exist() -> None:
    for service in documents(DOCKER / "compose.yaml")[0]["services"].values():
        for mount in service.get("volumes", []):
            if isinstance(mount, str) and mount.startswith("./"):
                assert (DOCKER / mount.partition(":")[0]).is_file(), mount
