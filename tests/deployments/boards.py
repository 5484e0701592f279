"""The board and the alerts as tests read them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).resolve().parents[2] / "dashboards"
BOARD = DASHBOARDS / "grafana-foretoken.json"
ALERTS = DASHBOARDS / "alerts.yaml"
VARIABLES = ("model", "application", "replica")


@dataclass(frozen=True)
class Query:
    panel: int
    ref: str
    title: str
    expression: str

    @property
    def id(self) -> str:
        return f"{self.title}-{self.ref}"

    def filled(self, interval: str) -> str:
        """With every variable at All, and rates over this interval."""
        text = self.expression.replace("$__rate_interval", interval)
        for name in VARIABLES:
            text = text.replace(f'"${name}"', '".*"')
        assert "$" not in text
        return text


def board() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(BOARD.read_text("utf-8"))
    return read


def panels() -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = board()["panels"]
    return every


def board_queries() -> list[Query]:
    return list(_queries())


def _queries() -> Iterator[Query]:
    for panel in panels():
        for target in panel.get("targets", []):
            yield Query(panel["id"], target["refId"], panel["title"], target["expr"])
