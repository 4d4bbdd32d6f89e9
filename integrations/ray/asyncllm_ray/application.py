"""Start of a Serve application, with asyncllm's errors."""

from __future__ import annotations

import re
import time
from typing import Any

from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.config import HTTPOptions

from asyncllm import EngineError, ModelLoadError
from asyncllm import validation as check

_POLL = 0.2
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def run(
    application: serve.Application,
    name: str = "llm",
    *,
    route_prefix: str | None = None,
    http_options: dict[str, Any] | None = None,
    timeout: float = 300.0,
) -> Any:
    """Deploy an application, or update it, and wait until it runs; returns its handle.

    ``serve.run`` does the same, but waits without a limit if resources are missing, and always
    opens an HTTP port. This function starts Serve if Serve does not run yet, with HTTP only if
    ``route_prefix`` or ``http_options`` is given.

    Args:
        application: result of ``deployment``, or an application that contains one.
        name: the application's name.
        route_prefix: path of its HTTP endpoint; None for an application without one.
        http_options: "host" and "port" of HTTP, for a Serve that does not run yet.
        timeout: seconds that the replicas may take to start.

    Raises:
        InvalidRequestError: for an argument that cannot be used; if HTTP cannot listen at that host
            and port, or for another name than Serve can store.
        ModelLoadError: if a replica could not load its model; has the text of the replica's error.
        EngineError: if the application does not run in time; the message says what is missing.
    """
    timeout = check.seconds("timeout", timeout, exclusive_low=True)
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise check.value_error("name", name, "up to 100 letters, digits, '-', '_' and '.'")
    if not isinstance(application, serve.Application):
        accepted = "a serve.Application, which deployment() and openai_app() return"
        raise check.value_error("application", application, accepted)
    is_path = isinstance(route_prefix, str) and route_prefix.startswith("/")
    if route_prefix is not None and not is_path:
        raise check.value_error(
            "route_prefix", route_prefix, "a path that starts with '/', or None"
        )
    _check_http(http_options)
    _start_serve(route_prefix is not None or http_options is not None, http_options)
    target = serve.RunTarget(application, name, route_prefix)
    [handle] = serve.run_many([target], wait_for_applications_running=False)
    until = time.monotonic() + timeout
    while True:
        found = serve.status().applications.get(name)
        if found is not None and found.status == "RUNNING":
            return handle
        if found is not None and found.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise ModelLoadError(f"the application {name!r} cannot start: {_describe(found)}")
        if time.monotonic() > until:
            state = "not known to Serve" if found is None else _describe(found)
            raise EngineError(
                f"the application {name!r} is not running after {timeout:.1f} s: {state}; "
                "num_cpus, num_gpus and memory in ray_actor_options have to fit into the cluster"
            )
        time.sleep(_POLL)


def _check_http(given: Any) -> None:
    """Check "host" and "port" of HTTP, and its other options. An error of Serve's controller about
    them has no field's name, and Serve ignores unknown options."""
    if given is None:
        return
    if not isinstance(given, dict):
        raise check.value_error("http_options", given, "a dict of options of HTTP, or None")
    known = HTTPOptions.model_fields
    for name in given:
        if name not in known:
            raise check.value_error("http_options", name, f"one of {', '.join(sorted(known))}")
    check.integer("port", given.get("port"), 0, 65535, optional=True)
    try:
        HTTPOptions(**given)
    except ValueError as error:
        accepted = f"options of serve.config.HTTPOptions ({error})"
        raise check.value_error("http_options", given, accepted) from error


def _start_serve(has_http: bool, http_options: dict[str, Any] | None) -> None:
    if not has_http:
        serve.start(proxy_location="Disabled")
        return
    try:
        serve.start(proxy_location="EveryNode", http_options=http_options)
    except RayTaskError as error:
        serve.shutdown()  # Starting fails only if Serve did not run before.
        reason = str(error.cause).strip().rpartition("\n")[2]
        accepted = f"a host and port to listen on, or None ({reason})"
        raise check.value_error("http_options", http_options, accepted) from error


def _describe(found: Any) -> str:
    parts = [f"{found.status.value} {found.message}".strip()]
    for name, one in found.deployments.items():
        parts.append(f"deployment {name!r} {one.status.value} {one.message}".strip())
    return "\n".join(parts)
