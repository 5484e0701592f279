"""Another draft takes over between two rounds: no text changes, no memory is lost, other drafters notice nothing."""

import gc
import random
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ConfigError
from engine.drafters.translation import DraftText
from engine.engine import Engine
from engine.heads.states import LATE_ROWS, TargetStates
from engine.loading import draft_swap
from engine.loading.draft_swap import num_bytes
from engine.loading.load import make_drafters
from engine.models.runner import kv_shape
from engine.types import DrafterName, InvalidRequest, Request, SamplingParams
from policies.config import PolicyConfig
from tests.engine.driving import Drive, drive, load, model_drafter
from tests.engine.foreign import save_foreign
from tests.engine.heads.eagles import save_eagle_pair, save_head
from tests.engine.heads.fitted import mlp_config, random_mlp, save_heads
from tests.engine.pairs import VOCAB, Pair, Shape, save_checkpoint
from tests.examples import in_proofs
from tests.kv import kv_kind

SETTINGS: dict[str, Any] = {"max_running": 3, "max_spec_length": 4, "max_step_tokens": 24, "max_model_len": 64}
STEPS = 9  # of a run without drafts that are accepted, at least
FEW = [(1, 5), (2, 6), (3, 7), (4, 8)]  # moments that `make test` tries, in turn for the changes
CHANGES = [  # `make test` tries the first five
    ("model", "other"), ("model", "head"), (None, "model"), ("model", None), ("foreign", "model"), ("model", "foreign"),
    ("head", "model"), ("head", "eagle"), (None, "head"), ("head", None), ("model", "mlp"), ("mlp", "head"),
]  # fmt: skip
Checkpoints = dict[str | None, str | None]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A target, and what can draft for it: two models, one with other token ids, and three kinds of heads."""
    folder = tmp_path_factory.mktemp("swap")
    pair = save_eagle_pair(folder)
    like, shape = Path(pair.target), Shape(layers=6)
    model = save_checkpoint(folder / "model", shape, seed=2, like=like, noise=0.12)
    return {
        None: None,
        "target": pair.target,
        "model": model,
        "other": save_checkpoint(folder / "other", shape, seed=3, like=like, noise=0.3),
        "foreign": save_foreign(model, folder / "foreign", bos=True),
        "head": pair.draft,
        "eagle": save_head(folder / "eagle", pair.target, "eagle"),
        "mlp": str(save_heads(folder / "mlp", random_mlp(), **mlp_config())),
    }


def start(checkpoints: Checkpoints, draft: str | None, **settings: Any) -> Engine:
    target = checkpoints["target"]
    assert target is not None
    pair = Pair(target, checkpoints[draft])  # type: ignore[arg-type]  # a pair may lack its draft here
    return load(pair, **{**SETTINGS, **settings})


def make_requests(count: int = 4, **fields: Any) -> list[Request]:
    """Every other one samples. The last ones share the beginning of their prompts."""
    rng = random.Random(5)
    shared = tuple(rng.randrange(2, VOCAB) for _ in range(20))
    requests = []
    for i in range(count):
        own = tuple(rng.randrange(2, VOCAB) for _ in range(rng.randint(2, 9)))
        params = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=10, ignore_eos=True)
        requests.append(Request(f"r{i}", (shared if i > 1 else ()) + own, params, **fields))
    return requests


def swap(engine: Engine, draft: str | None) -> None:
    """Put the draft in place now."""
    engine.put_draft(engine.load_draft(draft)).release()
    engine.audit()


def swapping(engine: Engine, step: int, draft: str | None) -> Callable[[], None]:
    """What puts the draft in place after so many steps."""
    new, count = engine.load_draft(draft), [0]

    def after_step() -> None:
        count[0] += 1
        if count[0] == step:
            engine.put_draft(new).release()
        engine.audit()

    return after_step


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints) -> dict[str, list[int]]:
    """The texts without drafts."""
    return drive(start(checkpoints, "model"), make_requests(k=0)).tokens


# --- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "steps"),
    [
        *(
            pytest.param(*c, FEW[n % len(FEW)], id="-".join(map(str, c)), marks=[pytest.mark.proofs] * (n > 4))
            for n, c in enumerate(CHANGES)
        ),
        *(
            pytest.param(*change, range(STEPS), id="-".join(map(str, (*change, "all"))), marks=pytest.mark.proofs)
            for change in CHANGES
        ),
    ],
)
def test_a_swap_after_any_step_changes_no_text(
    checkpoints: Checkpoints, plain: dict[str, list[int]], old: str | None, new: str | None, steps: Seq[int]
) -> None:
    """One engine goes back and forth, so that it also swaps while it is idle."""
    engine = start(checkpoints, old)
    for step in steps:
        run = drive(engine, make_requests(), after_step=swapping(engine, step, checkpoints[new]))
        before, after = sum(s.drafted for s in run.steps[:step]), sum(s.drafted for s in run.steps[step:])
        if step:  # 0: it never happens
            assert run.tokens == plain
            assert (before > 0) == (old is not None and step > 1)
            assert after > 0 if new is not None and step < 6 else new is not None or not after
            assert engine.config.draft == checkpoints[new]
        swap(engine, checkpoints[old])


@pytest.mark.parametrize("deterministic", [False, *in_proofs(True)])
def test_drafts_come_from_the_new_draft_as_soon_as_it_has_read(checkpoints: Checkpoints, deterministic: bool) -> None:
    """The target as its own draft: in the round after the swap everything is accepted, so every text was read."""
    engine = start(checkpoints, "other", deterministic=deterministic)
    run = drive(engine, make_requests(3), after_step=swapping(engine, 4, checkpoints["target"]))
    assert run.steps[3].accepted < run.steps[3].drafted
    assert run.steps[4].accepted == run.steps[4].drafted > 0


def test_swaps_in_every_round_under_every_verifier(checkpoints: Checkpoints) -> None:
    """At temperature 0 all verifiers write the same text. Each draft takes over from each; requests come and go."""
    names = ("model", "head", None, "foreign", "mlp", "eagle", "other")
    requests = [
        replace(r, verifier=v, id=f"{v}-{r.id}", params=replace(r.params, temperature=0.0))
        for v in ("match", "rejection", "block")
        for r in make_requests(2)
    ]
    engine = start(checkpoints, "model")
    want = drive(engine, [replace(r, k=0) for r in requests]).tokens
    new, count = [engine.load_draft(checkpoints[name]) for name in names[1:]], [0]

    def after_step() -> None:
        # A draft serves twice here, so it must hold nothing when it comes back.
        engine.put_draft(new[count[0] % len(new)]).release()
        count[0] += 1
        engine.audit()

    run = drive(engine, {0: requests[:3], 3: requests[3:]}, {5: [requests[4].id]}, after_step=after_step)
    ended = requests[4].id
    assert {n: t for n, t in run.tokens.items() if n != ended} == {n: t for n, t in want.items() if n != ended}
    assert run.drafted > 20


@pytest.mark.skipif(kv_kind() == "slotted", reason="a slotted cache preempts nobody")
@pytest.mark.parametrize("new", ["head", *in_proofs(None)])
def test_a_swap_while_memory_is_short(checkpoints: Checkpoints, new: str | None) -> None:
    """Sequences are preempted after it."""
    requests = [replace(r, params=replace(r.params, max_tokens=34)) for r in make_requests()]
    want = drive(start(checkpoints, "model"), [replace(r, k=0) for r in requests]).tokens
    engine = start(checkpoints, "model", kv_tokens=72, block_size=4)
    run = drive(engine, requests, after_step=swapping(engine, 6, checkpoints[new]))
    assert run.tokens == want
    preempted = [s.preempted for s in run.steps]
    assert sum(preempted[6:]) > 0


def test_the_new_draft_s_tokenizer_reads_the_text(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """And not that of the old one; negative control: where its tokens are kept."""
    twin = save_foreign(str(checkpoints["model"]), tmp_path / "twin", seed=1)
    for spoiled in (False, True):
        engine = start(checkpoints, "foreign")
        for request in make_requests(3):
            engine.submit(request)
        for _ in range(4):
            engine.step()
        sequences = list(engine._sequences.values())
        texts = [sequence.draft_text for sequence in sequences]
        swap(engine, twin)
        for sequence, text in zip(sequences, texts, strict=True):
            assert sequence.draft_text is None
            assert text is not None
            sequence.draft_text = text if spoiled else None
        engine.step()
        runner = model_drafter(engine).runner
        assert runner.translation is not None
        read = [runner.tokens(sequence) for sequence in sequences]
        fresh = [DraftText(runner.translation).sync(sequence.tokens) for sequence in sequences]
        assert (read == fresh) != spoiled


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model", "head"),
        *(pytest.param(*change, marks=pytest.mark.proofs) for change in (("head", "model"), ("eagle", None))),
    ],
)
def test_the_old_draft_s_memory_is_free_at_once(checkpoints: Checkpoints, old: str, new: str | None) -> None:
    """Without the garbage collector: a replica freezes what it loaded, and the collector then leaves it alone."""
    engine = start(checkpoints, old)
    drive(engine, make_requests())
    for request in make_requests():
        engine.submit(request)
    for _ in range(4):
        engine.step()
    runner = model_drafter(engine).runner
    kept = [weakref.ref(part) for part in (runner, runner.cache, runner.storage)]
    del runner
    gc.collect()
    gc.disable()
    try:
        swap(engine, checkpoints[new])
        assert [ref() for ref in kept] == [None] * len(kept)
    finally:
        gc.enable()
    assert (engine.target.reader is None) == (new != "head")
    engine.cancel_all()
    engine.step()
    engine.audit()


@pytest.mark.parametrize("draft", ["model", "foreign", "head", "eagle", "mlp"])
def test_loading_leaves_the_numbers_of_rounds_alone(
    checkpoints: Checkpoints, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread puts them meanwhile, and nothing guards them."""
    engine = start(checkpoints, None)

    def refuse(*given: object) -> None:
        raise AssertionError(f"{given} of another thread")

    for name in ("begin", "note", "ints", "int32s", "floats", "keep", "send"):
        monkeypatch.setattr(engine.target.staging, name, refuse)
    assert engine.load_draft(checkpoints[draft]).model is not None


def test_a_new_draft_gets_memory_by_the_rules_of_the_start(checkpoints: Checkpoints) -> None:
    for draft in ("model", "head", "foreign"):
        begun, joined = start(checkpoints, draft), start(checkpoints, None)
        swap(joined, checkpoints[draft])
        assert model_drafter(joined).runner.layout == model_drafter(begun).runner.layout
        assert joined.target.layout == begun.target.layout
        fields = ("_max_catch_up", "_chunk", "_rank", "_vocab")
        for field in fields:
            assert getattr(model_drafter(joined), field) == getattr(model_drafter(begun), field)


def test_a_draft_that_does_not_fit_is_refused_with_the_figures(checkpoints: Checkpoints) -> None:
    engine = start(checkpoints, "model")
    before, room = model_drafter(engine), engine._room
    assert room > 0
    needed = num_bytes(engine.config, before, engine.target)
    engine._room = needed - 1
    with pytest.raises(ConfigError, match=r"other needs .* MiB of weights and .* MiB of KV memory, and .* left"):
        engine.load_draft(checkpoints["other"])
    assert model_drafter(engine) is before
    assert engine.config.draft == checkpoints["model"]
    engine._room = room
    swap(engine, checkpoints["head"])
    head = engine.drafter.model  # type: ignore[attr-defined]
    assert engine._room == room + needed - num_bytes(engine.config, head, engine.target) != room
    swap(engine, checkpoints["model"])
    assert engine._room == room
    swap(engine, None)
    assert engine._room == room + needed
    swap(engine, checkpoints["mlp"])
    assert needed > room + needed - engine._room > 0


@pytest.mark.parametrize("head", ["head", "eagle", "mlp"])
def test_the_states_that_wait_for_a_head_are_counted(checkpoints: Checkpoints, head: str) -> None:
    """By the size of their table, which the first pass makes, and by that of rows that come to it late."""
    engine = start(checkpoints, None)
    room = engine._room
    swap(engine, checkpoints[head])
    drive(engine, make_requests())
    reader, model = engine.target.reader, engine.drafter.model  # type: ignore[attr-defined]
    assert isinstance(reader, TargetStates)
    assert reader._table is not None
    own = model.heads.weight_bytes if head == "mlp" else model.runner.decoder.weight_bytes
    if head != "mlp":
        kv = kv_shape(model.runner.decoder.config, torch.float64, torch.device("cpu"))
        own += model.runner.layout.tokens * kv.token_bytes
        own += 2 * LATE_ROWS * reader._table[0].nbytes
    assert room - engine._room == own + reader._table.nbytes


@pytest.mark.parametrize(("draft", "layers"), [("model", 0), ("head", 3), ("eagle", 1), ("mlp", 1)])
def test_states_that_wait_for_a_head_take_room(checkpoints: Checkpoints, draft: str, layers: int) -> None:
    """As loading asks of it: a state of each layer that is read, 64 float64 numbers, for each token of a step."""
    taken = []
    for tokens in (24, 48):
        engine = start(checkpoints, None, max_step_tokens=tokens)
        before = engine._room
        swap(engine, checkpoints[draft])
        taken.append(before - engine._room)
        swap(engine, None)
        assert engine._room == before
    assert taken[1] - taken[0] == 24 * layers * 64 * 8


def test_memory_that_runs_out_while_loading_is_a_refusal(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(checkpoints, "model")

    def fail(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(draft_swap, "load_draft", fail)
    with pytest.raises(ConfigError, match=r"other cannot be loaded beside the models that serve: .*9 bytes"):
        engine.load_draft(checkpoints["other"])


def test_an_old_draft_that_leaks_is_told(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    """Negative control of the audit: a sequence that nobody forgets keeps its slot."""
    engine = start(checkpoints, "model")
    for request in make_requests(2):
        engine.submit(request)
    for _ in range(4):
        engine.step()
    old = engine.put_draft(engine.load_draft(None))
    assert len(old.sequences) == 2
    replace(old, sequences=old.sequences[:1]).release()
    assert "not accounted for" in caplog.text


# --- what is refused -------------------------------------------------------------------------------------------------


def test_drafts_that_could_not_serve_from_the_start_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    engine = start(checkpoints, "model")
    before = model_drafter(engine)
    wrong = save_head(tmp_path / "wide", str(checkpoints["target"]), "safeailab", target_hidden_size=128)
    broken = Path(save_checkpoint(tmp_path / "broken", Shape(), seed=7))
    (broken / "model.safetensors").write_bytes(b"no weights")
    for draft, why in (
        (str(tmp_path / "nothing"), "there is no directory"),
        (wrong, "hidden size 128"),
        (str(broken), "model.safetensors"),
    ):
        with pytest.raises(ConfigError, match=why):
            engine.load_draft(draft)
    run = drive(engine, make_requests())
    assert run.drafted > 0
    assert model_drafter(engine) is before


def test_conflicts_with_other_settings_are_refused(checkpoints: Checkpoints) -> None:
    engine = start(checkpoints, "model", drafter="model")
    with pytest.raises(ConfigError, match="drafter 'model' needs a draft checkpoint"):
        engine.load_draft(None)
    several = start(checkpoints, None, drafts=(checkpoints["model"], checkpoints["other"]))
    for draft in (None, checkpoints["model"]):
        with pytest.raises(ConfigError, match=r"cannot replace the drafts .*model, .*other while the server runs"):
            several.load_draft(draft)


# --- the drafters of a request ---------------------------------------------------------------------------------------


def test_drafters_can_be_named_while_they_are_there(checkpoints: Checkpoints) -> None:
    engine = start(checkpoints, None)
    named = make_requests(1, drafter="model", k=3)[0]
    with pytest.raises(InvalidRequest, match="no drafter 'model'"):
        engine.check(named)
    assert (engine.intake.capabilities.drafter or "none") == "none"
    swap(engine, checkpoints["head"])
    assert engine.intake.capabilities.drafter == "model"
    assert engine.drafters == start(checkpoints, "model").drafters
    engine.check(named)
    engine.submit(named)
    late = replace(named, id="late")
    engine.check(late)
    swap(engine, None)
    engine.submit(late)  # it was checked before
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    assert [output.finish_reason for output in outputs if output.finish_reason] == ["length"] * 2
    assert not any(output.drafts for output in outputs)
    with pytest.raises(InvalidRequest, match="no drafter 'model'"):
        engine.check(named)


@pytest.mark.parametrize(
    "fields",
    [{"k": 3}, {"tree": (2, 1)}, {"k": 3, "verifier": "rejection", "lenience": 0.5}],
    ids=lambda fields: [*fields][-1],
)
def test_a_request_that_was_checked_before_the_draft_left_is_served(
    checkpoints: Checkpoints, fields: dict[str, Any]
) -> None:
    """It asks for drafts and leaves the drafter to the server, which has none when the request reaches the engine."""
    engine = start(checkpoints, "model")
    request = make_requests(2, **fields)[1]
    engine.check(request)
    swap(engine, None)
    engine.submit(request)
    with pytest.raises(InvalidRequest):
        engine.check(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    assert [output.finish_reason for output in outputs if output.finish_reason] == ["length"]
    assert not any(output.drafts for output in outputs)


def test_a_running_request_that_left_it_to_the_server_gets_the_first_draft(checkpoints: Checkpoints) -> None:
    engine = start(checkpoints, None)
    free, limited, off, fixed = make_requests(4)
    requests = [free, replace(limited, max_k=2), replace(off, k=0), replace(fixed, drafter="suffix")]
    run = drive(engine, requests, after_step=swapping(engine, 4, checkpoints["model"]))
    records = {name: told.record for name, told in run.received.items()}
    told = {n: (r.drafter, r.k_max, r.fixed_k, any(r.column("drafted"))) for n, r in records.items() if r is not None}
    assert told["r0"] == ("model", 4, None, True)
    assert told["r1"] == ("model", 2, None, True)
    assert told["r2"] == (None, 0, 0, False)
    assert told["r3"][0] == "suffix"


@pytest.mark.parametrize("drafter", ["ngram", "suffix", *in_proofs("lookup", "lookahead", "prediction", "cascade")])
def test_the_other_drafters_keep_what_they_know(checkpoints: Checkpoints, drafter: DrafterName) -> None:
    """Round by round they draft what they draft without a swap."""
    rng = random.Random(1)
    phrase = tuple(rng.randrange(2, VOCAB) for _ in range(6))
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, allowed_token_ids=phrase)
    guess = phrase * 4 if drafter in ("prediction", "cascade") else ()
    request = Request("", phrase * 3, greedy, k=4, drafter=drafter, prediction_ids=guess)
    requests = [replace(request, id=f"r{i}", prompt_ids=phrase * 3 + phrase[:i]) for i in range(2)]

    def rounds(after: Callable[[Engine], Callable[[], None]]) -> list[tuple[int, int]]:
        engine = start(checkpoints, None)
        run: Drive = drive(engine, requests, after_step=after(engine))
        return [(s.drafted, s.accepted) for s in run.steps]

    want = rounds(lambda engine: lambda: None)
    assert sum(drafted for drafted, _ in want) > 8

    def often(engine: Engine) -> Callable[[], None]:
        new = engine.load_draft(None)

        def after_step() -> None:
            engine.put_draft(new).release()

        return after_step

    assert rounds(often) == want


def test_negative_control_new_drafters_know_nothing(checkpoints: Checkpoints) -> None:
    """Where the swap replaces all drafters, a prediction is found late, and lookahead has no n-grams."""
    rng = random.Random(1)
    phrase = tuple(rng.randrange(2, VOCAB) for _ in range(6))
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, allowed_token_ids=phrase)
    request = Request("r", phrase * 3, greedy, k=4, drafter="lookahead")

    def rounds(*, forgetful: bool) -> list[tuple[int, int]]:
        engine = start(checkpoints, None)

        def after_step() -> None:
            if forgetful:
                engine.drafter = make_drafters((), engine.target.device, 100)
                engine.speculator._drafter = engine.drafter

        run = drive(engine, [request], after_step=after_step)
        return [(s.drafted, s.accepted) for s in run.steps]

    assert rounds(forgetful=True) != rounds(forgetful=False)


# --- the policy ------------------------------------------------------------------------------------------------------


def test_the_policy_forgets_the_old_draft_only(checkpoints: Checkpoints) -> None:
    engine = start(checkpoints, "model", policy=PolicyConfig("goodput"))
    control = engine.speculator.control
    others = [replace(r, id=f"s{r.id}") for r in make_requests(2, k=3, drafter="suffix")]
    drive(engine, make_requests(3, k=3) + others)
    control._learn()
    populations = control.estimator._populations
    assert "model" in populations
    kept = {name: p for name, p in populations.items() if name != "model"}
    scores = [(t.batch, t.drafts, t.score_s) for t in control.timings]
    swap(engine, checkpoints["head"])
    assert "model" not in populations
    assert {name: populations[name] for name in kept} == kept
    assert [(t.batch, t.drafts, t.score_s) for t in control.timings] == scores
    assert not any(t.forwards or t.read or t.draft_s for t in control.timings)
    assert not control.cost._draft.known


def test_an_idle_engine_profiles_the_new_draft_once(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.engine.PROFILE_S", 60.0)
    engine = start(checkpoints, "model", max_running=1, max_spec_length=2)
    control = engine.speculator.control
    swap(engine, checkpoints["head"])
    engine.repeat_profile(interrupted=lambda: True)
    assert not any(t.forwards for t in control.timings)  # a request came, so it is tried again
    engine.repeat_profile(interrupted=lambda: False)
    profile = control.timings
    assert any(t.forwards for t in profile)
    engine.repeat_profile(interrupted=lambda: False)
    assert control.timings is profile
    swap(engine, None)
    before = control.timings
    engine.repeat_profile(interrupted=lambda: False)
    assert control.timings is before
    drive(engine, make_requests())


def test_a_profile_that_is_kept_serves_at_once(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(checkpoints, "other", max_running=1, max_spec_length=2)
    monkeypatch.setattr("engine.engine.PROFILE_S", 60.0)
    swap(engine, checkpoints["model"])
    engine.repeat_profile(interrupted=lambda: False)
    swap(engine, checkpoints["other"])
    new = engine.load_draft(checkpoints["model"])
    guess = engine.speculator.control.cost.draft_cost(())
    assert (new.cost.cost(1) != guess.cost(1)).any()
