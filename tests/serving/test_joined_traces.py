"""Where Serve traces too, through its own proxy and through HAProxy: our spans join its trace."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest

from tests.serving.collector import Span, collecting
from tests.serving.conftest import AUTOSCALING, SERVE_RUN, _free_port, serving
from tests.serving.test_exported_traces import CLIENT, Traced, traced_settings, variables

# tests/app/telemetry has the default tests: test_tracer.py of the parent, test_export.py of the exporters.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.proofs]

SERVE = {
    "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": "deployments.tracing:exporters",
    "RAY_SERVE_TRACING_SAMPLING_RATIO": "1",
}


@contextmanager
def tracing(folder: Path, more: dict[str, str]) -> Iterator[Traced]:
    """The application by `serve run`, in a cluster with these variables and with a collector of its own."""
    with collecting() as collector, ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (variables(collector) | more).items():
                patch.setenv(name, value)
            autoscaling = AUTOSCALING | {"max_replicas": 1}
            served = stack.enter_context(serving(folder, traced_settings(folder), autoscaling, SERVE_RUN))
        yield Traced(served, collector)


@contextmanager
def haproxy() -> Iterator[dict[str, str]]:
    """Variables that start it with ports and files of its own, beside another one on this machine."""
    ports = {f"RAY_SERVE_HAPROXY_{name}_PORT": str(_free_port()) for name in ("METRICS", "STATS")}
    files = {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "state",
    }
    drain = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0"}
    with tempfile.TemporaryDirectory(prefix="ha") as folder:  # short: the path of a Unix socket is limited
        places = {name: str(Path(folder) / file) for name, file in files.items()}
        yield {"RAY_SERVE_ENABLE_HA_PROXY": "1"} | drain | ports | places


def climb(traced: Traced) -> list[Span]:
    """The span of a new request, and those that it hangs from, up to the one below the client's."""
    trace, _ = traced.ask(stream=True)
    above = [traced.collector.request(trace)]
    while (parent := above[-1].parent) != CLIENT:
        above += traced.collector.wait(partial(traced.collector.of, trace, parent))
    return above


@pytest.mark.parametrize("proxy", ["python", "haproxy"])
def test_a_request_joins_the_trace_of_serve(tmp_path: Path, proxy: str) -> None:
    """Ours hangs from the span of Serve's replica, and that, at last, from the client's; none of ours without the
    client's leave, though Serve makes its own then too (Ray 2.60)."""
    beside: AbstractContextManager[dict[str, str]] = haproxy() if proxy == "haproxy" else nullcontext({})
    with beside as more, tracing(tmp_path, SERVE | more) as traced:

        def as_meant() -> list[Span] | None:
            """HAProxy makes no spans; until it knows the replica, a Python proxy stands in for it."""
            above = climb(traced)
            processes = {span.resource["service.instance.id"] for span in above}
            return above if len(processes) == (2 if proxy == "python" else 1) else None

        above = traced.collector.wait(as_meant)
        assert above[0].kind == "INTERNAL"
        assert above[1].name.startswith("replica_handle_request")
        top = "proxy_http_request" if proxy == "python" else "replica_handle_request"
        assert above[-1].name.startswith(top)
        assert {span.resource["service.name"] for span in above} == {"foretoken"}
        unsampled, _ = traced.ask(sampled=False)
        traced.collector.request(traced.ask()[0])
        ours = {span.trace for span in traced.collector.spans if span.name.startswith("text_completion ")}
        assert unsampled not in ours
