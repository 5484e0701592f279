"""The agents' benchmark: its load is the same at every run, its greedy acceptance, and the report."""

import json
from itertools import pairwise

import pytest
import torch

from benchmarks import agents
from engine.loading.load import make_drafters
from engine.models.tokenizer import Tokenizer
from engine.trees import ROOT, Parents

TOKENIZER = "models/demo/target"


def test_the_load_depends_on_the_seed_alone() -> None:
    tokenizer = Tokenizer(TOKENIZER)
    load = agents.make_load(tokenizer, sessions=1, seed=3)
    assert load == agents.make_load(tokenizer, sessions=1, seed=3)
    assert load != agents.make_load(tokenizer, sessions=1, seed=4)
    assert [work.kind for work in load] == ["tool", "tool", "log", "edit", "edit", "log"]
    for before, work in pairwise(load):
        so_far = [*before.prompt, *before.output]
        assert work.prompt[: len(so_far)] == so_far


@pytest.mark.parametrize(
    ("tokens", "parents", "output", "accepted"),
    [
        ([], (), [1], 0),
        ([1, 2, 3], (ROOT, 0, 1), [1, 2, 4, 5], 2),
        ([1, 5, 2, 9], (ROOT, 0, ROOT, 2), [2, 9, 7], 2),
        ([1, 2], (ROOT, 0), [1, 2], 1),  # the last token is the target's own
        ([2, 1], (ROOT, 0), [1, 2, 3], 0),
    ],
)
def test_what_a_greedy_target_accepts(tokens: list[int], parents: Parents, output: list[int], accepted: int) -> None:
    assert agents.accepted_path(tokens, parents, output) == accepted


def test_repeated_requests_are_drafted_from_each_other() -> None:
    work = agents.Work("tool", [5, 6], [*range(100, 140)])
    for shared, rounds in ((True, 8), (False, 80)):
        drafter = make_drafters([], torch.device("cpu"), 1000 if shared else 0)
        played = agents.play([work, work], drafter, agents.GuessVariant("suffix", "suffix", tree=True), rows=16)
        assert played.emitted == {"tool": 80}
        assert played.accepted == 80 - played.rounds.total()
        assert played.rounds.total() == pytest.approx(rounds if not shared else 40 + rounds, abs=4)
        drafter.audit(set())


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    agents.main(["--sessions=1", "--rows=4"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["drafter"] for row in report["results"]] == [drafting.name for drafting in agents.DRAFTINGS]
    assert all(1 <= row["tok/round"] <= 5 and row["drafts/round"] <= 4 for row in report["results"])
    assert report["workload"]["requests"] == 6
