"""Files that make a box: what `serve deploy`, Docker, KubeRay and systemd are given."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.config import ServeConfig, load_config
from deploy.local_ray import RAY_VARIABLES
from tests.deploy.box.standing_ray import ROOT, unit_environment

DEPLOY = ROOT / "deploy"
SYSTEMD, CONTAINER = DEPLOY / "systemd", DEPLOY / "container"
IMAGES = ("Dockerfile.310p", "Dockerfile.cpu")
UNITS = sorted(path.name for path in SYSTEMD.glob("*.service"))
DRIVER = {"davinci_manager", "devmm_svm", "hisi_hdc"}


def rayservice() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "kuberay/rayservice.yaml").read_text())


def serve_documents() -> dict[str, dict[str, Any]]:
    return {
        "serve.yaml": yaml.safe_load((DEPLOY / "serve.yaml").read_text()),
        "rayservice.yaml": yaml.safe_load(rayservice()["spec"]["serveConfigV2"]),
    }


def settled_s(config: ServeConfig) -> float:
    """What a coordinator may take to end: see coordinator_deployment."""
    return config.drain_timeout_s + config.step_timeout_s + 30


@pytest.mark.parametrize("name", ["serve.yaml", "rayservice.yaml"])
def test_serve_takes_the_configuration_and_nrank_its_args(name):
    from ray.serve import schema as ray_schema

    document = serve_documents()[name]
    [told] = document["applications"]
    for part, kind in (
        (document, ray_schema.ServeDeploySchema),
        (document["http_options"], ray_schema.HTTPOptionsSchema),
        (document["logging_config"], ray_schema.LoggingConfig),
        (told, ray_schema.ServeApplicationSchema),
        *((one, ray_schema.DeploymentSchema) for one in told.get("deployments", ())),
    ):
        assert set(part) <= set(kind.model_fields), "Serve would pass over it in silence"
    schema = ray_schema.ServeDeploySchema.model_validate(document)
    [application] = schema.applications
    assert (application.name, application.route_prefix) == ("nrank", "/")
    assert application.import_path == "deploy.serve:build"
    assert schema.http_options.request_timeout_s is None
    assert not {"host", "port"} & set(application.args), "these are Serve's here"
    ServeConfig.model_validate(application.args)
    assert {deployment.name for deployment in application.deployments} <= {"Coordinator"}


def test_serve_builds_the_application_of_serve_yaml():
    """As `serve build` and a replica of the controller do: import path, then the builder."""
    from ray._common.utils import import_attr
    from ray.serve._private.build_app import build_app

    [application] = serve_documents()["serve.yaml"]["applications"]
    built = import_attr(application["import_path"])(application["args"])
    found = build_app(built, name="nrank")
    assert {deployment.name for deployment in found.deployments} == {"Ingress", "Coordinator"}
    assert found.ingress_deployment_name == "Ingress"


def test_a_standing_ray_starts_with_the_same_variables_as_ours():
    told = unit_environment()
    assert {name: told.get(name) for name in RAY_VARIABLES} == RAY_VARIABLES


@pytest.mark.parametrize("image", IMAGES)
def test_images_start_ray_with_the_same_variables(image):
    [words] = [rest for word, rest in instructions(image) if word == "ENV"]
    pairs = dict(pair.split("=", 1) for pair in shlex.split(words))
    assert pairs == unit_environment()


def instructions(image: str) -> list[tuple[str, str]]:
    """(word, rest) of each, continued lines joined, comments left out."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (CONTAINER / image).read_text()).replace("\\\n", " ")
    return [tuple(line.split(" ", 1)) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("image", IMAGES)
def test_images_are_pinned_run_as_a_user_and_below_an_init(image):
    found = instructions(image)
    by_word = dict(found)
    assert re.fullmatch(r"\S+:\S*\d+\.\d+\.\d+\S*", by_word["FROM"]), "a whole version"
    assert re.fullmatch(r"[1-9]\d*(:\d+)?", by_word["USER"])
    # Not `-g`: only nrank itself gets the signal that starts a drain.
    assert by_word["ENTRYPOINT"] == '["/usr/bin/tini", "--", "/usr/local/bin/nrank-entry"]'
    assert by_word["CMD"].startswith('["nrank", "serve"')
    assert by_word["STOPSIGNAL"] == "SIGTERM"
    for word, rest in found:
        if "apt-get install" in rest:
            packages = rest.partition("--no-install-recommends")[2].partition("&&")[0].split()
            assert {name for name in packages if "=" not in name} <= {"wget"}
        assert "pip install" not in rest or "-c deploy/container/constraints.txt" in rest
        assert word != "ADD"
        assert not re.search(r"latest|RAY_EXPERIMENTAL_NOSET|--privileged", rest)


@pytest.mark.parametrize("image", IMAGES)
def test_what_images_copy_is_there_and_let_through(image):
    ignored = (CONTAINER / f"{image}.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    for word, rest in instructions(image):
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source.split("/")[0] in allowed, source
    assert (CONTAINER / "nrank-entry").stat().st_mode & 0o111


def pins() -> dict[str, str]:
    """Of both files that pip is given; a local part as in `+cpu` left out."""
    lines = [
        line
        for name in ("constraints.txt", "torch.txt")
        for line in (CONTAINER / name).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[a-z0-9-]+==[^\s=]+", line) for line in lines)
    pairs = (line.split("==") for line in lines)
    return {name: version.partition("+")[0] for name, version in pairs}


def test_every_dependency_is_pinned_within_what_nrank_asks_for():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins()
    for text in project["dependencies"]:
        wanted = Requirement(text)
        version = pinned[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version), text
    assert project["optional-dependencies"]["npu"] == [f"torch_npu=={pinned['torch']}"]


def test_no_package_of_an_image_brings_triton_or_cuda():
    assert not [name for name in pins() if re.search(r"triton|nvidia|cuda", name)]
    assert "+cpu" in (CONTAINER / "torch.txt").read_text()
    assert (
        "! python3 -m pip show --quiet triton triton-ascend"
        in (CONTAINER / "Dockerfile.310p").read_text()
    )


def test_compose_mounts_the_driver_and_a_chip_a_rank():
    [service] = yaml.safe_load((CONTAINER / "compose.yaml").read_text())["services"].values()
    devices = {path.removeprefix("/dev/") for path in service["devices"]}
    config = load_config(str(SYSTEMD / "nrank.yaml"), {"dtype": "float16", "mtp": 0})
    assert devices == DRIVER | {f"davinci{chip}" for chip in range(config.ranks)}
    mounted = [volume.split(":")[1] for volume in service["volumes"]]
    assert "/etc/nrank/nrank.yaml" in mounted
    assert config.model.startswith("/srv/models/")
    assert all(volume.endswith(":ro") for volume in service["volumes"])
    assert service["init"] is False
    assert "privileged" not in service
    minutes = re.fullmatch(r"(\d+)m", service["stop_grace_period"])
    assert int(minutes[1]) * 60 > settled_s(config)


@pytest.mark.parametrize("base", ["cann", "ascend-toolkit"])
def test_the_entry_sets_cann_up_and_becomes_the_command(tmp_path, base):
    (tmp_path / base).mkdir()
    (tmp_path / base / "set_env.sh").write_text("export FROM_CANN=$UNSET_BEFORE-yes\nfalse\n")
    (tmp_path / "driver/lib64").mkdir(parents=True)
    command = [str(CONTAINER / "nrank-entry"), "sh", "-c", "echo $$ $FROM_CANN $LD_LIBRARY_PATH"]
    process = subprocess.Popen(
        command,
        env={"PATH": os.environ["PATH"], "ASCEND_BASE": str(tmp_path), "LD_LIBRARY_PATH": "/mine"},
        stdout=subprocess.PIPE,
        text=True,
    )
    pid, value, path = process.communicate(timeout=20)[0].split()
    assert int(pid) == process.pid, "a signal to the entry has to reach the command"
    assert value == "-yes"
    assert path.split(":")[0] == f"{tmp_path}/driver/lib64"
    assert path.split(":")[-1] == "/mine"


def test_the_entry_changes_nothing_where_cann_is_not(tmp_path):
    script = "echo [$LD_LIBRARY_PATH]; exit 3"
    environment = {"PATH": os.environ["PATH"], "ASCEND_BASE": str(tmp_path)}
    command = [str(CONTAINER / "nrank-entry"), "sh", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (3, "[]\n", "")


# Required fields and closed sets of KubeRay's RayService (ray.io/v1) as far as this file goes.
def test_the_rayservice_has_the_fields_that_kuberay_requires():
    document = rayservice()
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayService")
    spec = document["spec"]
    assert set(spec) <= {"serveConfigV2", "rayClusterConfig", "upgradeStrategy"}
    assert spec["upgradeStrategy"] == {"type": "None"}, "a second cluster would find no chips"
    cluster = spec["rayClusterConfig"]
    assert set(cluster) <= {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == pins()["ray"]
    for group in cluster["workerGroupSpecs"]:
        assert {"groupName", "minReplicas", "maxReplicas", "template"} <= set(group)
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def groups() -> list[dict[str, Any]]:
    cluster = rayservice()["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


@pytest.mark.parametrize("group", groups(), ids=["head", "boxes"])
def test_a_pod_has_a_chip_a_rank_and_tells_ray_so(group):
    [args] = [one["args"] for one in serve_documents()["rayservice.yaml"]["applications"]]
    told = group["rayStartParams"]["resources"]
    assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    [read] = shlex.split(told)  # the shell takes the outer quotes, Ray reads the rest
    assert yaml.safe_load(read) == {"NPU": args["ranks"]}
    pod = group["template"]["spec"]
    [container] = pod["containers"]
    limits = container["resources"]["limits"]
    assert limits["huawei.com/Ascend310P"] == str(args["ranks"])
    assert container["resources"]["requests"] == limits, "a pod with cores of its own"
    assert limits["cpu"].isdecimal()
    assert not container["image"].endswith(":latest")


@pytest.mark.parametrize("group", groups(), ids=["head", "boxes"])
def test_a_pod_keeps_the_init_process_and_time_to_drain(group):
    [args] = [one["args"] for one in serve_documents()["rayservice.yaml"]["applications"]]
    annotations = group["template"]["metadata"]["annotations"]
    assert annotations == {"ray.io/overwrite-container-cmd": "true"}
    pod = group["template"]["spec"]
    [container] = pod["containers"]
    assert container["command"] == ["/usr/bin/tini", "--", "/usr/local/bin/nrank-entry"]
    assert "$KUBERAY_GEN_RAY_START_CMD" in container["args"][-1]
    [waits] = [int(one["value"]) for one in container["env"] if "DRAIN_TIMEOUT" in one["name"]]
    drains = settled_s(ServeConfig.model_validate(args))
    assert drains <= waits < pod["terminationGracePeriodSeconds"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert {"/srv/models", "/dev/shm", "/usr/local/Ascend/driver"} <= set(mounts.values())
    assert not any("NOSET" in one["name"] for one in container["env"])


def unit(name: str) -> list[tuple[str, str, str]]:
    """(section, key, value) of each setting."""
    found, section = [], ""
    for line in (SYSTEMD / name).read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            found.append((section, key, value))
    return found


def values(name: str, key: str) -> list[str]:
    return [value for _, found, value in unit(name) if found == key]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_takes_the_units(tmp_path):
    """With programs that exist here in the place of those of the box."""
    for name in UNITS:
        text = (SYSTEMD / name).read_text()
        text = re.sub(
            r"/opt/nrank/(deploy/container|deploy/systemd|\.venv/bin)/[\w-]+(?!\S)",
            "/bin/true",
            text,
        )
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in UNITS)],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not [line for line in done.stderr.splitlines() if str(tmp_path) in line], done.stderr
    assert done.returncode == 0, done.stderr


def test_units_name_files_that_a_checkout_has():
    for name in UNITS:
        for path in re.findall(r"/opt/nrank/(deploy/[\w./-]+)", (SYSTEMD / name).read_text()):
            assert (ROOT / path).is_file(), (name, path)


def test_the_server_is_told_to_drain_alone_and_given_the_time():
    config = load_config(str(SYSTEMD / "nrank.yaml"), {"dtype": "float16", "mtp": 0})
    assert values("nrank.service", "KillMode") == ["mixed"]
    assert float(values("nrank.service", "TimeoutStopSec")[0]) > settled_s(config)
    assert float(values("nrank-deploy.service", "TimeoutStopSec")[0]) > settled_s(config)
    assert set(values("nrank.service", "RestartPreventExitStatus")[0].split()) == {"2", "3"}


def test_the_two_ways_to_run_exclude_each_other():
    assert set(values("nrank.service", "Conflicts")[0].split()) == set(UNITS) - {"nrank.service"}
    for name in set(UNITS) - {"nrank.service"}:
        assert values(name, "Conflicts") == ["nrank.service"]
    assert values("nrank-deploy.service", "Requires") == ["nrank-ray.service"]
    assert values("nrank-deploy.service", "After") == ["nrank-ray.service"]


@pytest.mark.parametrize("name", UNITS)
def test_units_run_as_their_own_user_with_rays_variables(name):
    assert values(name, "User") == ["nrank"]
    assert values(name, "EnvironmentFile") == ["/opt/nrank/deploy/systemd/ray.env"]


def test_prometheus_and_grafana_find_what_they_are_pointed_at():
    folder = DEPLOY / "monitoring"
    prometheus = yaml.safe_load((folder / "prometheus.yml").read_text())
    assert all((folder / path).is_file() for path in prometheus["rule_files"])
    targets = [one["static_configs"][0]["targets"] for one in prometheus["scrape_configs"][:1]]
    config = load_config(str(SYSTEMD / "nrank.yaml"), {"dtype": "float16", "mtp": 0})
    assert targets == [[f"{config.host}:{config.port}"]]
    [provider] = yaml.safe_load((folder / "grafana/dashboards/nrank.yml").read_text())["providers"]
    boards = Path(provider["options"]["path"].replace("$NRANK_HOME", str(ROOT)))
    assert list(boards.glob("*.json"))


def test_the_runbook_names_files_and_commands_that_exist():
    from deploy.cli import make_parser

    text = (ROOT / "docs/runbook.md").read_text()
    for path in re.findall(r"\b(?:deploy|docs|dashboards|tests)/[\w./-]+\w", text):
        assert (ROOT / path).exists(), path
    commands = set(make_parser()._subparsers._group_actions[0].choices)
    used = set(re.findall(r"\bnrank ([a-z][a-z-]+)\b", text))
    assert {"doctor", "plan", "serve"} <= used
    assert not used & {"deploy"}
    for line in re.findall(r"(?m)^(?:\S*/)?nrank ([a-z-]+)", text):
        assert line in commands, line
