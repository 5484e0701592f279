"""Sends the spans of Serve's own proxies and replicas to the same collector as ours. Set these variables:

RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH=deployments.tracing:exporters RAY_SERVE_TRACING_SAMPLING_RATIO=1
"""

import os

from opentelemetry.sdk.trace import SpanProcessor

from app.telemetry import names
from app.telemetry.export import processors


def exporters() -> list[SpanProcessor]:
    """Return the processors for Serve, which calls this in every traced process before it makes the provider.

    They export by OTLP to the endpoint of the OTEL_* variables, by default on this machine. Serve's provider gets no
    resource: it reads its service name from the environment only (Ray 2.60).
    """
    os.environ.setdefault("OTEL_SERVICE_NAME", names.SCOPE)
    return processors(default="otlp")
