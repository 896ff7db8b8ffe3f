"""The JobSet manifests: valid, and what they make of the run's flags and exit codes."""

import copy
import json
import math
import re
import subprocess

import jsonschema
import launch_tools as tools
import pytest
import yaml

from maxdiloco import errors

SCHEMA = json.loads((tools.ROOT / "tests/launch/jobset_schema.json").read_text(encoding="utf-8"))
KINDS = {"tpu": tools.TPU, "gpu": tools.GPU}
ALL = {"QUEUE": "q", "TEXT_CLAIM": "my-text", "RESERVATION": "projects/p/reservations/r"}


def launched(folder, variables, *arguments):
    """The manifest that kubectl got."""
    command, text = tools.launch("jobset_run", ["first", *arguments], folder, **variables)
    assert command == ["create", "--namespace=default", "-f", "-"]
    return yaml.safe_load(text)


@pytest.fixture(scope="module", params=KINDS)
def manifest(request, tmp_path_factory):
    """(tpu or gpu, the manifest with every optional variable)."""
    folder = tmp_path_factory.mktemp("launch")
    return request.param, launched(folder, KINDS[request.param] | ALL, "model_name=tiny")


def pod(whole):
    (replicated,) = whole["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]["template"]["spec"]


def faults(whole):
    return [fault.message for fault in jsonschema.Draft202012Validator(SCHEMA).iter_errors(whole)]


def test_the_manifest_fits_the_schema_of_jobset(manifest, tmp_path):
    """With every optional variable and without."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert faults(manifest[1]) == faults(launched(tmp_path, tools.TPU)) == []
    for mistake in (
        lambda m: m.update(apiVersion="jobset.x-k8s.io/v1"),
        lambda m: m["spec"]["failurePolicy"]["rules"][0].update(action="Fail"),
        lambda m: m["spec"]["replicatedJobs"][0]["template"]["spec"].update(backofLimit=0),
        lambda m: pod(m)["volumes"][0].update(emptyDirr={}),
    ):
        broken = copy.deepcopy(manifest[1])
        mistake(broken)
        assert len(faults(broken)) == 1


def test_only_exit_codes_that_may_pass_restart_the_jobset(manifest):
    """A Job with such a code fails by its policy, and any other by its backoff limit of 0."""
    spec, container = manifest[1]["spec"], pod(manifest[1])["containers"][0]
    policy = spec["failurePolicy"]
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert policy["maxRestarts"] == 50
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0
    assert pod(manifest[1])["restartPolicy"] == "Never", "a pod failure policy needs it"
    (rule,) = job["podFailurePolicy"]["rules"]
    final = {e.exit_code for e in (errors.ConfigError, errors.DataError, errors.NumericsError)}
    again = {e.exit_code for e in (errors.LostPeerError, errors.SaveError, errors.Preempted)}
    assert (rule["action"], set(rule["onExitCodes"].pop("values"))) == ("FailJob", final | {1})
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In"}
    assert not (final | {1}) & again


def test_a_slice_is_a_job_on_nodes_of_its_kind(manifest):
    kind, whole = manifest
    (replicated,) = whole["spec"]["replicatedJobs"]
    job, labels = replicated["template"]["spec"], pod(whole)["nodeSelector"]
    limits = pod(whole)["containers"][0]["resources"]["limits"]
    counted = (replicated["replicas"], job["parallelism"], job["completions"])
    assert labels.pop("cloud.google.com/reservation-name") == "r"
    if kind == "tpu":
        assert counted == (2, 4, 4) and limits == {"google.com/tpu": 4}
        assert labels == {
            "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
            "cloud.google.com/gke-tpu-topology": "4x4",
        }
        exclusive = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        assert whole["metadata"]["annotations"] == {exclusive: "cloud.google.com/gke-nodepool"}
    else:
        assert counted == (2, 2, 2) and limits == {"nvidia.com/gpu": 8}
        assert labels == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    context = pod(whole)["containers"][0].get("securityContext")  # of the image: not root
    assert context == ({"privileged": True, "runAsUser": 0} if kind == "tpu" else None)
    mounts = {m["name"]: m["mountPath"] for m in pod(whole)["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(whole)["volumes"]}
    assert mounts == {"shm": "/dev/shm", "text": "/text"}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16G"}
    assert volumes["text"]["persistentVolumeClaim"] == {"claimName": "my-text", "readOnly": True}


def test_the_topologies_are_those_the_project_compiles_for(monkeypatch):
    """Each size of a kind, with the hosts of a slice of 4 chips each."""
    monkeypatch.syspath_prepend(str(tools.ROOT / "scripts/launch"))
    import with_kubectl

    from maxdiloco.planning import topology

    known = [(kind, *one) for kind in topology.TPUS for one in topology.names(kind).items()]
    for kind, name, shape in known:
        wrong = []
        selector, hosts = with_kubectl.nodes({"TPU_TYPE": name}, "tpu", wrong)
        assert wrong == []
        assert selector["cloud.google.com/gke-tpu-topology"] == "x".join(map(str, shape))
        assert selector["cloud.google.com/gke-tpu-accelerator"] == with_kubectl.TPUS[kind][0]
        assert hosts * 4 == math.prod(shape)


def expanded(text, variables):
    """As Kubernetes does: $$ is $, $(NAME) a variable; another $ stays."""
    known = {"$$": "$"} | {f"$({name})": value for name, value in variables.items()}
    return re.sub(r"\$\$|\$\([^)]*\)", lambda found: known.get(found[0], found[0]), text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_flags_arrive_in_the_pod_as_they_were_written(kind, tmp_path):
    given = ["configs/quickstart.yml", "sample_prompt=$(HOME) $$ '\"x: #", "steps=3"]
    container = pod(launched(tmp_path, KINDS[kind], *given))["containers"][0]
    fixed = [f"hardware={kind}", "base_output_directory=gs://bucket/runs", "run_name=first"]
    found = [expanded(word, {"HOME": "wrong"}) for word in container["args"]]
    assert found == [*given, *fixed]


def test_a_gpu_pod_knows_its_number_and_its_slice(tmp_path):
    """Job 1, pod 1 of two slices of two nodes; the command runs with a stand-in for Python."""
    container = pod(launched(tmp_path, tools.GPU))["containers"][0]
    (tmp_path / "python").write_text('#!/bin/sh\nenv | grep ^JAX_ | sort; echo "$@"\n')
    (tmp_path / "python").chmod(0o755)
    fields = {"JOB_INDEX": "1", "JOBSET_COORDINATOR": "first-slice-0-0.first"}
    known = {"JOB_COMPLETION_INDEX": "1"}
    for variable in container["env"]:
        of = fields.get(variable["name"])
        known[variable["name"]] = expanded(variable["value"], known) if of is None else of
    command = [expanded(word, known) for word in container["command"]] + ["a b", "c"]
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, env=known | path, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "JAX_COORDINATOR_ADDRESS=first-slice-0-0.first:8476",
        "JAX_NUM_PROCESSES=4",
        "JAX_PARTITION_INDEX=1",
        "JAX_PROCESS_ID=3",
        "-m maxdiloco.train a b c",
    ], done.stderr
