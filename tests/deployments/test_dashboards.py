"""The dashboard and the alerts without a Prometheus: complete, readable, and only with metric families that exist."""

import re
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import yaml

from tests.deployments.boards import ALERTS, VARIABLES, board, board_queries, panels
from tests.deployments.test_metrics import COUNTERS, GAUGES, HISTOGRAMS

SERIES = {f"ray_{name}" for name in (*COUNTERS, *GAUGES)} | {f"ray_{name}_bucket" for name in HISTOGRAMS}
LABELS = {f"ray_{name}": set(keys) for name, keys in (COUNTERS | GAUGES).items()}
LABELS |= {f"ray_{name}_bucket": {*keys, "le"} for name, keys in HISTOGRAMS.items()}
COMMON = {"model_name", "application", "replica"}
SELECTOR = '{model_name=~"$model", application=~"$application", replica=~"$replica"'
GRID = 24


def series_in(text: str) -> set[str]:
    return set(re.findall(r"\bray_[a-z_]+", text))


def overlapping(grid: list[dict[str, int]]) -> list[tuple[dict[str, int], dict[str, int]]]:
    def apart(a: dict[str, int], b: dict[str, int], start: str, size: str) -> bool:
        return a[start] + a[size] <= b[start] or b[start] + b[size] <= a[start]

    return [(a, b) for a, b in combinations(grid, 2) if not apart(a, b, "x", "w") and not apart(a, b, "y", "h")]


def alerts() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]
    return rules


def test_panels_have_places_and_numbers_of_their_own() -> None:
    grid = [panel["gridPos"] for panel in panels()]
    assert overlapping(grid) == []
    assert all(place["x"] + place["w"] <= GRID for place in grid)
    assert max(Counter(panel["id"] for panel in panels()).values()) == 1


def test_panels_that_lie_on_each_other_are_found() -> None:
    one = {"x": 0, "y": 0, "w": 6, "h": 4}
    assert overlapping([one, one | {"x": 5, "y": 3}])
    assert not overlapping([one, one | {"x": 6}, one | {"y": 4}])


def test_every_panel_says_what_it_shows_and_asks_for_it() -> None:
    assert any(panel["type"] != "row" for panel in panels())
    for panel in panels():
        assert panel["title"]
        if panel["type"] != "row":
            assert len(panel["description"]) > 10, panel["title"]
            assert panel["targets"], panel["title"]
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs)
            assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_the_rows_are_those_that_an_operator_asks_for_in_that_order() -> None:
    rows = [panel["title"] for panel in panels() if panel["type"] == "row"]
    assert rows == ["Is it paying?", "Why", "Latency", "Load and memory", "Policy", "Telemetry health and faults"]


def test_the_variables_are_the_data_source_and_those_that_queries_use() -> None:
    names = [variable["name"] for variable in board()["templating"]["list"]]
    assert names == ["datasource", *VARIABLES]


@pytest.mark.parametrize("query", board_queries(), ids=lambda query: query.id)
def test_every_query_is_about_series_that_exist_and_follows_the_variables(query: Any) -> None:
    found = series_in(query.expression)
    assert found
    assert found <= SERIES
    assert len(re.findall(r"\bray_[a-z_]+\{", query.expression)) == query.expression.count(SELECTOR)
    grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", query.expression) for label in by.split(",")}
    assert grouped <= set.union(*(LABELS[name] for name in found))


def test_every_family_is_on_the_board() -> None:
    assert set().union(*(series_in(query.expression) for query in board_queries())) == SERIES


def test_counters_are_only_read_as_rates() -> None:
    read = set[str]()
    for query in board_queries():
        for name in series_in(query.expression) - {f"ray_{name}" for name in GAUGES}:
            reads = re.findall(rf"(\w+)\({name}\{{", query.expression)
            assert set(reads) <= {"rate", "increase"}
            read.update(reads)
            assert len(reads) == len(re.findall(rf"\b{name}\{{", query.expression))
    assert read


def test_alerts_are_about_series_that_exist_and_say_what_to_do() -> None:
    assert len({alert["alert"] for alert in alerts()}) == len(alerts()) >= 4
    for alert in alerts():
        found = series_in(alert["expr"])
        assert found
        assert found <= SERIES
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"].keys() == {"summary", "description"}
        told = set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"])))
        grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", alert["expr"]) for label in by.split(",")}
        assert told <= grouped <= COMMON | set.union(*(LABELS[name] for name in found))
