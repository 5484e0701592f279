"""The sampling benchmark: that its rounds are what the engine does, and that it reports every case."""

import json

import pytest
import torch

from benchmarks import sampling


@pytest.mark.parametrize("case", sampling.CASES, ids=lambda case: case.name)
def test_rounds_accept_what_agrees(case: sampling.SamplingCase) -> None:
    """A draft that is the target is always accepted; one with nothing in common hardly ever."""
    target = sampling.zipf_logits(10, 500, seed=0)
    times = sampling.Times()
    with torch.inference_mode():
        assert sampling.run_round(case, target, target.clone(), 4, times) == 4
        assert sampling.run_round(case, target, -target, 4, times) < 1
    assert len(times.prepare) == len(times.draft) == len(times.verify) == 2
    assert times.total > 0


def test_zipf_logits_are_zipfs_law() -> None:
    logits = sampling.zipf_logits(3, 100, seed=0)
    law = logits.exp().sort(descending=True).values
    assert torch.allclose(law[:, 0] / law[:, 9], torch.full((3,), 10**sampling.EXPONENT))
    assert not torch.equal(logits[0], logits[1])


def test_every_case_is_reported(small_pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sampling.main([*small_pair, "--vocabularies=300", "--batch=2", "--rounds=2", "--prompts-count=2", "--json"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["case"] for row in report["results"]] == [case.name for case in sampling.CASES]
    assert all(row["total"] > 0 and row["of a round"] > 0 for row in report["results"])
