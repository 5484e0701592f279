"""Serve's own spans, of proxies and replicas, to where ours go: RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH names this.

RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH=deployments.tracing:exporters RAY_SERVE_TRACING_SAMPLING_RATIO=1
"""

import os

from opentelemetry.sdk.trace import SpanProcessor

from app.telemetry import names
from app.telemetry.export import processors


def exporters() -> list[SpanProcessor]:
    """Called by Serve in every process that it traces, before it makes that process's provider.

    OTLP to where the OTEL_* variables say, by default this machine. The provider is made without a resource and reads
    its service's name from the environment only (Ray 2.60).
    """
    os.environ.setdefault("OTEL_SERVICE_NAME", names.SCOPE)
    return processors(unless_said="otlp")
