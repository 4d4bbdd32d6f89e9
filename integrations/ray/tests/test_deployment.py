"""Deployments that cannot work, and what is asked of those that do."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import ray
from asyncllm_ray import deployment, run
from conftest import ENGINE, REPLICA
from ray import serve

from asyncllm import EngineError, InvalidRequestError, LogitsProcessor, ModelLoadError


def test_limits_come_from_the_engine(cluster: Any) -> None:
    app = deployment(max_num_seqs=8, max_queued_requests=16, drain=12.0)
    made = app._bound_deployment
    assert made.max_ongoing_requests == 24
    assert made._deployment_config.graceful_shutdown_timeout_s == 12.0


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"nonsense": 1}, "nonsense"),
        ({"lease": 0}, "lease"),
        ({"interval": -1}, "interval"),
        ({"drain": "long"}, "drain"),
    ],
)
def test_settings_are_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        deployment(**options)
    assert caught.value.param == param


def test_a_setting_that_cannot_be_sent_is_named() -> None:
    class Bias(LogitsProcessor):
        lock = threading.Lock()

    with pytest.raises(InvalidRequestError, match="can be sent") as caught:
        deployment(logits_processors=[Bias])
    assert caught.value.param == "logits_processors"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["\ud800", "", "a" * 101, None])
def test_a_name_that_serve_cannot_store_is_refused(name: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        run(deployment(), name)
    assert caught.value.param == "name"


def test_a_load_error_reaches_the_caller(cluster: Any) -> None:
    app = deployment("/nowhere/at/all", serve_options={"ray_actor_options": REPLICA})
    try:
        with pytest.raises(ModelLoadError, match="/nowhere/at/all"):
            run(app, "bad")
    finally:
        serve.delete("bad")


@pytest.mark.slow
def test_too_few_cpus_are_said(cluster: Any) -> None:
    app = deployment(**ENGINE, serve_options={"ray_actor_options": {"num_cpus": 64}})
    try:
        with pytest.raises(EngineError, match=r"not running after 5.0 s(.|\n)*UPDATING"):
            run(app, "large", timeout=5)
    finally:
        serve.delete("large")


def run_python(code: str) -> str:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return found.stderr + found.stdout


def test_ray_missing_or_too_old_is_said() -> None:
    missing = "import sys; sys.modules['ray'] = None; import asyncllm_ray"
    assert "pip install 'ray[serve]>=2.60'" in run_python(missing)
    old = "import ray, ray.serve; ray.__version__ = '2.9.3'; import asyncllm_ray"
    assert "Ray is 2.9.3; expected 2.60 or later" in run_python(old)


def test_ray_that_is_not_started_is_said() -> None:
    code = """
from asyncllm_ray import Client
try:
    Client(None)
except Exception as error:
    print(type(error).__name__, error)
"""
    assert "EngineClosedError Client(): Ray is not started" in run_python(code)


def test_no_private_name_of_serve_is_imported() -> None:
    import pathlib

    import asyncllm_ray

    folder = pathlib.Path(asyncllm_ray.__file__).parent
    sources = [path.read_text() for path in folder.glob("*.py")]
    assert len(sources) > 5
    assert not [text for text in sources if "_private" in text]


def test_the_cluster_is_ours(cluster: Any) -> None:
    assert ray.cluster_resources()["CPU"] == 2
