"""A decoder's layers for passes of few rows give what its layers give for any pass, up to rounding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig, WeightForm
from engine.kernels.row_products import most_rows
from engine.loading.load import load_models
from engine.models import few_rows
from engine.models.decoder import Decoder
from engine.models.feeds import Feed
from engine.models.few_rows import FewRows
from engine.models.runner import Runner
from tests.engine.driving import make_sequence
from tests.engine.models.families import CASES, random_checkpoint
from tests.engine.pairs import VOCAB
from tests.engine.shadow.cuda import shadow_cuda
from tests.examples import in_proofs, usual_and_proofs
from tests.kv import kv_config

PROMPT = 33
# (sequences, rows of each) of a pass
PASSES = [(1, 1), (1, 5), (3, 1), (4, 9)]
KNOWN = ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3")
OTHERS = {
    "llama with biases, yarn": "biases behind attention and MLP",
    "gemma2": "norms behind attention and MLP",
    "olmo2": "no norms in front",
    "granite": "a factor of what a layer adds",
    "mixtral": "experts",
}


def runner(checkpoint: Path, dtype: str = "float16", form: WeightForm = "as_is") -> Runner:
    memory: dict[str, Any] = {**kv_config(), "kv_tokens": 800, "max_running": 8, "max_model_len": 48}
    return load_models(EngineConfig(str(checkpoint), device="cuda", dtype=dtype, target_weights=form, **memory)).target


@torch.inference_mode()
def logits(model: Runner, sequences: int, rows: int) -> Tensor:
    """Return the logits of `rows` tokens of each sequence. Their prompts are read in passes before."""
    generator = torch.Generator().manual_seed(sequences * rows)
    texts = [torch.randint(2, VOCAB, (PROMPT + rows,), generator=generator).tolist() for _ in range(sequences)]
    made = [make_sequence(i, text) for i, text in enumerate(texts)]
    model.run([Feed(sequence, PROMPT, outputs=0) for sequence in made])
    found = model.run([Feed(sequence, rows, outputs=rows) for sequence in made]).cpu().double()
    for sequence in made:
        model.release(sequence)
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    """Over what rounding explains."""
    return float((found - expected).std() / expected.std()) / 0.01


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Is filled with the rows of the passes of few rows."""
    rows: list[int] = []
    add_layers = FewRows.add_layers

    def adding(few: FewRows, x: Tensor, *others: object) -> None:
        rows.append(len(x))
        add_layers(few, x, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(FewRows, "add_layers", adding)
    return rows


@pytest.mark.parametrize("name", usual_and_proofs(KNOWN, ("llama", "smollm3")))
def test_a_pass_of_few_rows_gives_what_any_pass_gives(
    name: str, used: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Path(random_checkpoint(CASES[name], tmp_path))
    with shadow_cuda():
        model = runner(checkpoint)
        used.clear()
        found = [logits(model, *shape) for shape in PASSES]
        monkeypatch.setattr(FewRows, "can_compute", lambda *_: False)
        expected = [logits(model, *shape) for shape in PASSES]
    assert used == [PROMPT, 1, PROMPT, 5, 3, 36]  # prompts of several sequences have too many rows
    assert max(map(distance, found, expected)) < 1


@pytest.mark.parametrize(
    "fault",
    [
        lambda norm, inputs: (None, norm.eps, norm.offset),
        *in_proofs(lambda norm, inputs: (norm.weight, 1.0, 0.0)),
    ],
)
def test_a_fault_is_seen(fault: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shadow_cuda():
        model = runner(Path(random_checkpoint(CASES["llama"], tmp_path)))
        expected = logits(model, 1, 1)
        monkeypatch.setattr(few_rows, "_inside", fault)
        assert distance(logits(model, 1, 1), expected) > 1


@pytest.mark.parametrize("name", usual_and_proofs(OTHERS, ("gemma2", "mixtral")))
def test_layers_that_the_operations_do_not_know(name: str, used: list[int], tmp_path: Path) -> None:
    with shadow_cuda():
        model = runner(Path(random_checkpoint(CASES[name], tmp_path)), "bfloat16")
    assert used == []
    assert cast(Decoder, model.decoder).few_rows is None


def test_weights_that_are_codes_or_wide_are_not_known(tmp_path: Path) -> None:
    checkpoint = Path(random_checkpoint(CASES["llama"], tmp_path))
    with shadow_cuda():
        forms: tuple[tuple[str, WeightForm], ...] = (("float64", "as_is"), ("bfloat16", "int8"))
        for dtype, form in forms:
            model = runner(checkpoint, dtype, form)
            assert cast(Decoder, model.decoder).few_rows is None


@pytest.mark.parametrize(("capability", "most"), [((8, 0), 0), ((9, 0), 64), ((10, 0), 0)])
def test_how_many_rows_are_few(capability: tuple[int, int], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert most_rows.__wrapped__(torch.device("cuda")) == most
