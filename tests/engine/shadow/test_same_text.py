"""An engine on the shadow device says in fp64 what the engine on the CPU says: for every verifier, drafter, parameter
and tree, and whatever happens to the memory and the draft on the way."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cache.paged import PagedCache
from engine.config import ConfigError, EngineConfig
from engine.engine import Engine
from engine.sampling import noise
from engine.trees import Growth
from engine.types import DRAFTERS, VERIFIERS, DrafterName, Request, SamplingParams, Typical, Verifier
from policies.config import PolicyConfig
from tests.engine.driving import load
from tests.engine.foreign import save_foreign
from tests.engine.heads.eagles import save_eagle_pair
from tests.engine.heads.fitted import mlp_config, random_medusa, random_mlp, save_heads
from tests.engine.heads.passing import ALLOWED, save_pass
from tests.engine.models.families import CASES, random_checkpoint
from tests.engine.pairs import Pair, Shape, save_checkpoint
from tests.engine.shadow.both import Both, run_both, without_measurements
from tests.examples import in_proofs, usual_and_proofs

K = 3
PROMPT = (*range(20, 30), *range(20, 23), 20, 21)
LOOP = ((20, 30.0), (21, 30.0), (22, 30.0))  # a bias towards three tokens: guesses from the text come true
PARAMS = SamplingParams(temperature=0.8, max_tokens=10, ignore_eos=True)
LIVELY = replace(PARAMS, temperature=2.0, max_tokens=30)  # for which the noise of many tokens matters
SETTINGS: dict[str, Any] = {
    "cache": "paged",
    "block_size": 5,
    "kv_tokens": 800,
    "max_running": 8,
    "max_spec_length": 4,
    "max_model_len": 64,
    "prefill_chunk": 40,  # or the schedule would depend on the device
}
ALONE = tuple(name for name in DRAFTERS if name != "merged")  # merged needs several drafts


@pytest.fixture(autouse=True)
def _without_measurements() -> Iterator[None]:
    with without_measurements():
        yield


def start(pair: Pair, device: str, **config: Any) -> Engine:
    return load(pair, device=device, **{"policy": PolicyConfig("fixed", k=K), **SETTINGS, **config})


def compare(pair: Pair, requests: Seq[Request], **config: Any) -> Both:
    both = run_both(lambda device: start(pair, device, **config), requests)
    both.check()
    return both


def make_requests(
    params: SamplingParams, drafters: Seq[DrafterName], verifier: Verifier, **fields: Any
) -> list[Request]:
    """Two requests for each drafter."""
    return [
        Request(
            f"{drafter}-{i}",
            PROMPT[i:],
            replace(params, seed=10 * n + i),
            verifier=verifier,
            drafter=drafter,
            prediction_ids=(21, 21, 20, 21, 20, 22, 20, 20) * 2 if drafter in ("prediction", "cascade") else (),
            **fields,
        )
        for n, drafter in enumerate(drafters)
        for i in range(2)
    ]


def groups(drafters: Seq[DrafterName]) -> list[list[str]]:
    return [[f"{drafter}-{i}" for i in range(2)] for drafter in drafters]


LAWS = list(product(VERIFIERS, (0.0, 0.8)))  # verifier and temperature
USUAL_LAWS = (("match", 0.0), *((verifier, 0.8) for verifier in VERIFIERS))  # at 0 all decide alike


@pytest.mark.parametrize("law", usual_and_proofs(LAWS, USUAL_LAWS), ids=str)
def test_every_drafter_under_every_verifier(pair: Pair, law: tuple[Verifier, float]) -> None:
    verifier, temperature = law
    params = replace(PARAMS, temperature=temperature, logit_bias=LOOP)
    both = compare(pair, make_requests(params, ALONE, verifier))
    both.check_drafts(*groups(ALONE))


@pytest.mark.parametrize("verifier", [*in_proofs("match"), "rejection"])
def test_several_drafts_merged(pair: Pair, drafts: tuple[str, str], verifier: Verifier) -> None:
    names: tuple[DrafterName, ...] = ("merged", "model")
    both = compare(pair, make_requests(PARAMS, names, verifier), drafts=drafts)
    both.check_drafts(*groups(names))


@pytest.mark.parametrize("verifier", [*in_proofs("match"), "rejection"])
@pytest.mark.parametrize("temperature", [*in_proofs(0.0), 0.8])
def test_chosen_trees(pair: Pair, verifier: Verifier, temperature: float) -> None:
    params = replace(PARAMS, temperature=temperature)
    trees = [(2, 1), (3,), (2, 1)]
    requests = [
        Request(f"r{i}", PROMPT[i:], replace(params, seed=i), verifier=verifier, tree=tree)
        for i, tree in enumerate(trees)
    ]
    chains = make_requests(params, ["model"], verifier)
    both = compare(pair, [*requests, *chains], policy=PolicyConfig("fixed", k=4))
    both.check_drafts([request.id for request in requests], *groups(["model"]))


@pytest.mark.parametrize("temperature", [*in_proofs(0.0), 0.8])
def test_growing_trees(pair: Pair, temperature: float) -> None:
    """Beside a tree of a planned shape, whose moves in memory are planned too."""
    params = replace(PARAMS, temperature=temperature)
    trees: list[tuple[int, ...] | Growth] = [Growth(4, 3), (2, 1), Growth(3, 2)]
    requests = [Request(f"r{i}", PROMPT[i:], replace(params, seed=i), tree=tree) for i, tree in enumerate(trees)]
    chains = make_requests(params, ["model"], "match")
    both = compare(pair, [*requests, *chains], policy=PolicyConfig("fixed", k=4))
    both.check_drafts([request.id for request in requests], *groups(["model"]))


PARAMETERS: dict[str, dict[str, Any]] = {
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 12},
    "min-p": {"min_p": 0.05},
    "all filters": {"top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "logit bias": {"logit_bias": ((5, 4.0), (6, -3.0))},
    "min tokens": {"min_tokens": 6, "ignore_eos": False, "logit_bias": ((1, 4.0),)},
    "excluded tokens": {"bad_word_ids": ((20,), (21, 22)), "logit_bias": LOOP},
    "allowed tokens": {"allowed_token_ids": tuple(range(20, 60))},
    "log-probabilities": {"logprobs": 3},
    "log-probabilities of the prompt": {"prompt_logprobs": 2, "logprobs": 0},
    "top-p and penalties": {"top_p": 0.9, "repetition_penalty": 1.2},
}


# The parameters change the laws, whichever verifier reads these.
@pytest.mark.parametrize("verifier", usual_and_proofs(VERIFIERS, ("block",)))
def test_every_parameter_under_every_verifier(pair: Pair, verifier: Verifier) -> None:
    requests = [
        Request(
            f"{name} {temperature}", PROMPT, replace(PARAMS, temperature=temperature, seed=i, **more), verifier=verifier
        )
        for i, (name, more) in enumerate(PARAMETERS.items())
        for temperature in (0.0, 0.8)
    ]
    both = compare(pair, requests)
    both.check_drafts(*[[f"{name} 0.0", f"{name} 0.8"] for name in PARAMETERS])
    told = [f"log-probabilities{what} {temperature}" for what in ("", " of the prompt") for temperature in (0.0, 0.8)]
    assert sorted(both.shadow.logprobs) == sorted(told)


def test_verifiers_and_temperatures_mixed_in_one_round(pair: Pair) -> None:
    requests = [
        Request(
            f"{verifier}-{temperature}", PROMPT, replace(PARAMS, temperature=temperature, seed=3), verifier=verifier
        )
        for verifier in VERIFIERS
        for temperature in (0.0, 0.8)
    ]
    both = compare(pair, requests)
    both.check_drafts()


@pytest.mark.parametrize("verifier", usual_and_proofs(VERIFIERS, ("match",)))
def test_the_noise_of_large_vocabularies(pair: Pair, verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "DENSE_NOISE_LIMIT", 0)
    both = compare(pair, make_requests(LIVELY, ["model"], verifier))
    both.check_drafts()


@pytest.mark.parametrize(
    "lossy", [{"lenience": 0.5}, {"typical": Typical(0.1, 0.3)}], ids=lambda lossy: next(iter(lossy))
)
def test_verdicts_that_change_the_law(pair: Pair, lossy: dict[str, Any]) -> None:
    """With a tree beside the chains."""
    tree = Request("tree", PROMPT, replace(PARAMS, seed=9), verifier="rejection", tree=(2, 1), **lossy)
    both = compare(pair, [*make_requests(PARAMS, ["model"], "rejection", **lossy), tree])
    both.check_drafts(["tree"], *groups(["model"]))


# --- drafts of other kinds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", ["match", *in_proofs("rejection")])
def test_a_head_that_reads_states(verifier: Verifier, tmp_path: Path) -> None:
    eagle = save_eagle_pair(tmp_path)
    params = replace(PARAMS, temperature=0.3)
    requests = make_requests(params, ["model"], verifier)
    tree = Request("tree", PROMPT, replace(params, seed=9), verifier=verifier, tree=(2, 1))
    both = compare(eagle, [*requests, tree], policy=PolicyConfig("fixed", k=4))
    both.check_drafts()


@pytest.mark.parametrize("kind", ["medusa", *in_proofs("mlp")])
def test_heads_without_memory(pair: Pair, kind: str, tmp_path: Path) -> None:
    if kind == "medusa":
        heads = save_heads(tmp_path / kind, random_medusa(), medusa_num_heads=2)
    else:
        heads = save_heads(tmp_path / kind, random_mlp(), **mlp_config())
    requests = make_requests(replace(PARAMS, logit_bias=LOOP, top_k=3), ["model"], "match", k=2)
    both = compare(Pair(pair.target, str(heads)), requests)
    both.check_drafts()


@pytest.mark.parametrize("verifier", [*in_proofs("match"), "rejection"])
def test_trees_that_heads_cut(pair: Pair, verifier: Verifier, tmp_path: Path) -> None:
    """What was put for the planned tree is not what its verification needs. Some trees stay whole, and some drafts are
    chains."""
    heads = save_heads(tmp_path / "medusa", random_medusa(), medusa_num_heads=2)
    params = replace(PARAMS, logit_bias=LOOP, top_k=3)
    trees = [(2, 1, 1), (2, 1), (3,)]
    requests = [
        Request(f"tree-{i}", PROMPT[i:], replace(params, seed=i), verifier=verifier, tree=tree)
        for i, tree in enumerate(trees)
    ]
    chains = make_requests(params, ["model"], verifier, k=2)
    both = compare(
        Pair(pair.target, str(heads)), [*requests, *chains], policy=PolicyConfig("fixed", k=6), max_spec_length=6
    )
    both.check_drafts([request.id for request in requests], *groups(["model"]))


def test_more_drafts_than_look_ahead_tokens(pair: Pair, tmp_path: Path) -> None:
    """Up to the end of the context, where there is memory for the drafts that come and not for all that were asked
    for."""
    heads, params = save_pass(tmp_path), replace(PARAMS, max_tokens=43, temperature=0.0, allowed_token_ids=ALLOWED)
    requests = [Request(f"r{k}", PROMPT[:-2], params, k=k) for k in (2, 6)]
    both = compare(Pair(pair.target, str(heads)), requests, max_spec_length=6, max_model_len=58)
    both.check_drafts([request.id for request in requests])


@pytest.mark.parametrize("verifier", ["rejection", *in_proofs("match", "block")])
def test_look_ahead_tokens_of_sampled_texts(pair: Pair, verifier: Verifier, tmp_path: Path) -> None:
    requests = make_requests(replace(PARAMS, allowed_token_ids=ALLOWED), ["model"], verifier)
    both = compare(Pair(pair.target, str(save_pass(tmp_path))), requests)
    both.check_drafts()


def test_a_draft_of_another_tokenizer(tmp_path: Path) -> None:
    shape = Shape(vocab=318)  # as many as the tokenizer has tokens
    target = save_checkpoint(tmp_path / "target", shape, seed=1)
    near = save_checkpoint(tmp_path / "near", shape, seed=2, like=Path(target), noise=0.02)
    foreign = Pair(target, save_foreign(near, tmp_path / "draft", dropped=8, bos=True))
    tree = Request("tree", PROMPT, replace(PARAMS, seed=9), tree=(2, 1))
    both = compare(foreign, [*make_requests(PARAMS, ["model"], "match"), tree])
    both.check_drafts()


# --- memory ---------------------------------------------------------------------------------------------------------


def test_prefixes_and_copied_blocks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, take_copies = [0, 0], PagedCache.take_copies

    def counting(cache: PagedCache) -> Iterator[tuple[int, int]]:
        for pair_of_blocks in take_copies(cache):
            copies[0] += 1
            yield pair_of_blocks

    monkeypatch.setattr(PagedCache, "take_copies", counting)
    prompt = tuple(range(30, 53))
    arrivals = {
        0: [Request("first", prompt, replace(PARAMS, seed=1))],
        3: [Request("second", prompt, replace(PARAMS, seed=2)), Request("third", prompt[:17], replace(PARAMS, seed=3))],
    }
    both = run_both(lambda device: start(pair, device), arrivals)
    both.check()
    both.check_drafts()
    assert sum(step.cached_tokens for step in both.shadow.run.steps) > 20
    assert copies[0] > 1


def test_preemption(pair: Pair) -> None:
    requests = [
        Request(f"r{i}", tuple(range(20 * i + 20, 20 * i + 40)), replace(PARAMS, seed=i, max_tokens=20, top_p=0.9))
        for i in range(3)
    ]
    both = run_both(lambda device: start(pair, device, kv_tokens=70, max_running=3, max_step_tokens=28), requests)
    both.check()
    both.check_drafts()
    assert sum(step.preempted for step in both.shadow.run.steps)


@pytest.mark.proofs  # test_graphs.py has windows, too
def test_sliding_windows(tmp_path: Path) -> None:
    case = CASES["mistral"]
    target = random_checkpoint(case, tmp_path / "target")
    windowed = Pair(target, random_checkpoint(case, tmp_path / "draft", seed=8, like=target))
    params = replace(PARAMS, temperature=0.3, max_tokens=16)
    requests = [
        *make_requests(params, ["model"], "match"),
        Request("tree", PROMPT, replace(params, seed=9), tree=(2, 1)),
    ]
    both = compare(windowed, requests)
    both.check_drafts()


# --- changes while it serves ----------------------------------------------------------------------------------------


def test_a_draft_that_is_replaced(pair: Pair, drafts: tuple[str, str]) -> None:
    def act(engine: Engine, step: int) -> None:
        if step in (2, 4, 6):
            draft = {2: drafts[1], 4: None, 6: drafts[0]}[step]
            engine.put_draft(engine.load_draft(draft)).release()

    requests = make_requests(replace(PARAMS, max_tokens=20), ["model"], "match")
    both = run_both(lambda device: start(pair, device), requests, act)
    both.check()
    both.check_drafts()


def test_a_policy_that_is_replaced(pair: Pair) -> None:
    """The confidence policy ends drafts where the draft model becomes unsure, which the device decides."""

    def act(engine: Engine, step: int) -> None:
        if step == 3:
            engine.configure(PolicyConfig("confidence", threshold=0.05))

    requests = make_requests(replace(PARAMS, max_tokens=16), ["model"], "match")
    both = run_both(lambda device: start(pair, device), requests, act)
    both.check()
    both.check_drafts()


def test_deterministic_is_refused_on_cuda() -> None:
    with pytest.raises(ConfigError, match="deterministic needs device cpu"):
        EngineConfig(target="t", device="cuda", deterministic=True)
