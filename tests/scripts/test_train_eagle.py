"""The EAGLE-3 trainer end to end on a tiny target, and its parts against slow references."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import GraniteConfig, GraniteForCausalLM

from scripts import heads_data
from scripts.eagle_head import EagleModule, HeadShape
from scripts.eval_eagle import load_head
from scripts.heads_data import TrainingRows, hidden_states, load_target, read_tokens, texts
from scripts.heads_loss import distil
from scripts.make_pair import make_pair
from scripts.pair_data import held_out
from scripts.train_demo_pair import step_once
from scripts.train_eagle import Objective, default_layers, main, make_optimisers, new_head, shape_of

LAYERS, HIDDEN, VOCAB, CONTEXT = 7, 32, 300, 24
SHAPE = HeadShape(
    hidden=16, intermediate=24, heads=4, kv_heads=2, head_dim=6, vocab=40, draft_vocab=40, rope_theta=500.0
)
TENSORS = {  # SafeAILab's names, with the shapes of a head for the tiny target
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    "midlayer.hidden_norm.weight": (HIDDEN,),
    "midlayer.input_layernorm.weight": (HIDDEN,),
    "midlayer.post_attention_layernorm.weight": (HIDDEN,),
    "midlayer.self_attn.q_proj.weight": (32, 2 * HIDDEN),
    "midlayer.self_attn.k_proj.weight": (16, 2 * HIDDEN),
    "midlayer.self_attn.v_proj.weight": (16, 2 * HIDDEN),
    "midlayer.self_attn.o_proj.weight": (HIDDEN, 32),
    "midlayer.mlp.gate_proj.weight": (64, HIDDEN),
    "midlayer.mlp.up_proj.weight": (64, HIDDEN),
    "midlayer.mlp.down_proj.weight": (HIDDEN, 64),
    "norm.weight": (HIDDEN,),
}


@pytest.fixture(scope="module", autouse=True)
def small_rows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CONTEXT": CONTEXT, "SHARD_ROWS": 4, "PREFIX": (2, 8)}.items():
            patch.setattr(heads_data, name, value)
        yield


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pair = tmp_path_factory.mktemp("pair")
    make_pair(pair, layers=LAYERS, draft_layers=1, hidden=HIDDEN, heads=2, kv_heads=1, ffn=64, vocab=VOCAB)
    return pair / "target"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten files, of which one is held out and has words of its own."""
    root = tmp_path_factory.mktemp("text")
    names = [f"m{i}.txt" for i in range(500)]
    for name in [n for n in names if not held_out(n)][:9]:
        (root / name).write_text("".join(f"line {i} of the file {name}\n" for i in range(20)))
    (root / next(n for n in names if held_out(n))).write_text("QQQQ ZZZZ XXXX\n" * 40)
    return root


def options(target: Path, text: Path, out: Path, *more: str) -> list[str]:
    sizes = ["--generated=1", "--plain=1", "--most-steps=2", "--batch=2", "--eval-prefixes=0"]
    return [f"--target={target}", f"--text={text}", f"--out={out}", *sizes, *more]


@pytest.fixture(scope="module")
def trained(target_path: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("head")
    main(options(target_path, text, out))
    return out


def step_of(out: Path) -> int:
    with safe_open(out / "work" / "head.safetensors", "pt") as file:
        return int(file.metadata()["step"])


def random_head(draft_ids: torch.Tensor | None = None, seed: int = 0) -> EagleModule:
    """A head in float64 whose weights are all random, norms included."""
    torch.manual_seed(seed)
    n = SHAPE.vocab if draft_ids is None else len(draft_ids)
    shape = HeadShape(**{**vars(SHAPE), "draft_vocab": n})
    head = EagleModule(shape, torch.randn(40, 16), torch.randn(40, 16), draft_ids).double()
    for weight in head.parameters():
        weight.data.normal_(std=0.5)
    return head


# The format


def test_the_checkpoint_has_the_names_the_shapes_and_the_types_of_the_format(trained: Path) -> None:
    weights = load_file(trained / "model.safetensors")
    assert {name: tuple(w.shape) for name, w in weights.items()} == TENSORS
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    config = json.loads((trained / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert config["draft_vocab_size"] == config["vocab_size"] == VOCAB
    assert (config["hidden_size"], config["head_dim"], config["num_key_value_heads"]) == (HIDDEN, 16, 1)


def test_the_checkpoint_is_the_trained_head_rounded_on_features_as_they_are(trained: Path, target_path: Path) -> None:
    """In training the features are divided by their scale; the checkpoint's fc has it inside."""
    written, _ = load_head(trained, load_target(target_path))
    kept, scale = load_file(trained / "work" / "head.safetensors"), TrainingRows(trained / "work", (2, 3, 4)).scale()
    assert scale != pytest.approx(1.0, abs=0.01)
    for name, weight in written.state_dict().items():
        expected = kept[name] / scale if name == "fc.weight" else kept[name]
        assert torch.equal(weight, expected.bfloat16().float()), name


def test_a_small_draft_vocabulary_is_the_most_frequent_tokens(target_path: Path, text: Path, tmp_path: Path) -> None:
    main(options(target_path, text, tmp_path, "--draft-vocab=50"))
    weights = load_file(tmp_path / "model.safetensors")
    extra = {name: tuple(w.shape) for name, w in weights.items() if name not in TENSORS}
    assert extra == {"lm_head.weight": (50, HIDDEN), "d2t": (50,), "t2d": (VOCAB,)}
    assert (weights["d2t"].dtype, weights["t2d"].dtype) == (torch.int64, torch.bool)
    ids = [i + offset for i, offset in enumerate(weights["d2t"].tolist())]
    assert weights["t2d"].nonzero().flatten().tolist() == ids == sorted(ids)
    tokens = np.concatenate([np.load(p) for p in (tmp_path / "work").glob("*-000.npy")]).flatten()
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[ids].min() >= np.delete(counts, ids).max()
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 50


@pytest.mark.parametrize(("n", "layers"), [(14, (2, 7, 11)), (32, (2, 16, 29)), (7, (2, 3, 4))])
def test_the_default_layers_are_those_of_the_paper_s_code(n: int, layers: tuple[int, ...]) -> None:
    assert default_layers(n) == layers


# The unrolled pass


def rope(x: torch.Tensor, position: int) -> torch.Tensor:
    """x [heads, size]: pairs (i, i + size / 2) as complex numbers, turned by position · θ^(-2 i / size)."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.tensor(
        [complex(math.cos(a), math.sin(a)) for a in (position * SHAPE.rope_theta ** (-i / half) for i in range(half))]
    )
    return torch.cat((turned.real, turned.imag), -1)


class SlowHead:
    """A head that runs one position at a time, from the names in the checkpoint and the paper's formulas alone."""

    def __init__(self, weights: dict[str, torch.Tensor], embedding: torch.Tensor) -> None:
        self.w, self.embedding = weights, embedding
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def copy(self) -> "SlowHead":
        other = SlowHead(self.w, self.embedding)
        other.keys, other.values = [*self.keys], [*self.values]
        return other

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean() + SHAPE.eps).sqrt() * self.w[f"{name}.weight"]

    def attend(self, x: torch.Tensor, position: int) -> torch.Tensor:
        q, k, v = ((self.w[f"midlayer.self_attn.{p}_proj.weight"] @ x).view(-1, SHAPE.head_dim) for p in "qkv")
        self.keys.append(rope(k, position))
        self.values.append(v)
        mixed = []
        for i, query in enumerate(rope(q, position)):
            kv = i // (SHAPE.heads // SHAPE.kv_heads)
            scores = torch.stack([query @ key[kv] for key in self.keys]) / math.sqrt(SHAPE.head_dim)
            mixed.append(sum(s * value[kv] for s, value in zip(scores.softmax(0), self.values, strict=True)))
        return self.w["midlayer.self_attn.o_proj.weight"] @ torch.cat([torch.as_tensor(m) for m in mixed])

    def step(self, next_token: int, g: torch.Tensor, position: int) -> torch.Tensor:
        """Return h of a position; its keys and values are kept."""
        embedded = self.norm("midlayer.input_layernorm", self.embedding[next_token])
        a = self.attend(torch.cat((embedded, self.norm("midlayer.hidden_norm", g))), position) + g
        x = self.norm("midlayer.post_attention_layernorm", a)
        gate, up = (self.w[f"midlayer.mlp.{p}_proj.weight"] @ x for p in ("gate", "up"))
        return self.w["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up) + a


@torch.no_grad()
def slow_unroll(head: EagleModule, tokens: list[int], features: torch.Tensor, steps: int) -> list[list[torch.Tensor]]:
    """[step][row]: read the text up to each position r, then `steps` - 1 more positions with own h."""
    text = SlowHead(dict(head.named_parameters()), head.embedding)
    found: list[list[torch.Tensor]] = [[] for _ in range(steps)]
    for r in range(len(tokens) - 1):
        h = text.step(tokens[r + 1], head.fc.weight @ features[r], r)
        drafting = text.copy()
        for s in range(steps):
            if r + s + 1 < len(tokens):
                h = drafting.step(tokens[r + s + 1], h, r + s) if s else h
                found[s].append(h)
    return found


def test_the_unrolled_pass_is_decoding_token_by_token_from_every_position() -> None:
    head = random_head()
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    features = torch.randn(2, 9, 48, dtype=torch.float64)
    fast = head.unroll(tokens, features, 4)
    for row in range(2):
        slow = slow_unroll(head, tokens[row].tolist(), features[row], 4)
        for s in range(4):
            assert len(slow[s]) == 8 - s
            torch.testing.assert_close(fast[s][row], torch.stack(slow[s]), rtol=0, atol=1e-6)


def test_one_pass_over_the_text_and_then_single_positions_are_the_unrolled_pass() -> None:
    """The same with the module's own decoding, in fp32 as in use."""
    head = random_head().float()
    tokens, features = torch.randint(0, 40, (2, 9)), torch.randn(2, 9, 48)
    unrolled = head.unroll(tokens, features, 3)
    for r in range(6):
        h, kv = head(tokens[:, 1 : r + 2], head.fuse(features[:, : r + 1]))
        for s in range(1, 3):
            h, kv = head(tokens[:, r + s + 1, None], h[:, -1:], r + s, kv)
            torch.testing.assert_close(h[:, -1], unrolled[s][:, r], rtol=1e-5, atol=1e-5)


def test_a_prediction_does_not_depend_on_what_it_is_to_predict() -> None:
    """Step s of row r may read tokens to r + s + 1 and features to r, nothing later."""
    head, features = random_head(), torch.randn(1, 9, 48, dtype=torch.float64)
    tokens = torch.randint(0, 40, (1, 9))
    before = head.unroll(tokens, features, 3)
    for s, r in ((0, 3), (2, 3)):
        changed, other = tokens.clone(), features.clone()
        changed[0, r + s + 2 :] = (changed[0, r + s + 2 :] + 1) % 40
        other[0, r + 1 :] += 1
        after = head.unroll(changed, other, 3)
        assert torch.equal(after[s][0, r], before[s][0, r])
        seen = tokens.clone()
        seen[0, r + s + 1] = (seen[0, r + s + 1] + 1) % 40
        assert not torch.equal(head.unroll(seen, features, 3)[s][0, r], before[s][0, r])


# The loss


@pytest.mark.parametrize("draft", [40, 25])
def test_the_loss_and_its_gradients_are_those_of_the_formula(draft: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 40 drafted tokens p sums to 1; with 25 the draft vocabulary lacks tokens of p."""
    monkeypatch.setattr("scripts.heads_loss.CHUNK", 7)  # three chunks, the last one short
    torch.manual_seed(2)
    x, matrix = (torch.randn(n, 16, dtype=torch.float64, requires_grad=True) for n in (18, draft))
    p = torch.randn(18, 40, dtype=torch.float64).mul(2).softmax(-1)[:, :draft]
    loss, alpha = distil(x, matrix, p, 0.3)
    found = torch.autograd.grad(5 * loss, (x, matrix))
    log_q = (x @ matrix.T).log_softmax(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1).mean()
    formula = -0.3 * (p * log_q).sum(-1).mean() + 0.7 * (1 - overlap)
    torch.testing.assert_close(alpha.double(), overlap, rtol=1e-6, atol=0)
    torch.testing.assert_close(loss.double(), formula, rtol=1e-6, atol=0)
    for own, expected in zip(found, torch.autograd.grad(5 * formula, (x, matrix)), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-9)


def test_training_learns_what_the_target_does(trained: Path, target_path: Path) -> None:
    """On one batch of its own text the head comes nearer to the target at every step of the draft."""
    target, rows = load_target(target_path), TrainingRows(trained / "work", (2, 3, 4))
    torch.manual_seed(0)
    head = new_head(target, shape_of(target, 3, None, None), np.ones(VOCAB))
    objective, batch = Objective(head, target, 3, rows.scale()), next(rows.batches(8, seed=0))
    optimisers = make_optimisers(head, 1e-2)
    first = objective(batch).item()
    assert objective.alphas is not None
    begun = objective.alphas
    for _ in range(60):
        step_once(optimisers, head, objective(batch), 1e-2)
    assert objective(batch).item() < 0.7 * first
    assert all(now > before + 0.1 for now, before in zip(objective.alphas, begun, strict=True))


# The data


def test_features_are_the_inputs_of_the_layers_and_the_last_state_gives_the_logits(target_path: Path) -> None:
    target = load_target(target_path)
    seen: dict[int, torch.Tensor] = {}
    layers = target.model.model.layers
    for i in (0, 2, 5):
        layers[i].register_forward_pre_hook(lambda _, given, i=i: seen.update({i: given[0].clone()}))
    rows = np.random.default_rng(0).integers(0, VOCAB, (2, 10)).astype(np.int32)
    states = torch.from_numpy(hidden_states(target, rows, (0, 2, 5))).float()
    for place, i in enumerate((0, 2, 5)):
        torch.testing.assert_close(states[:, :, place], seen[i], rtol=1e-3, atol=1e-3)
    logits = target.model(torch.from_numpy(rows).long()).logits
    torch.testing.assert_close(states[:, :, -1] @ target.head.T, logits, rtol=1e-2, atol=1e-2)


def test_the_target_continues_the_prefixes_and_no_row_has_held_out_text(
    trained: Path, target_path: Path, text: Path
) -> None:
    """A third of the rows is greedy: each of their tokens is the target's best after the prefix."""
    target = load_target(target_path)
    rows = np.load(trained / "work" / "generated-000.npy")
    assert rows.shape == (4, CONTEXT)
    assert [row[0] == 0 for row in rows[1::2]] == [True, True]  # every second prefix begins a text
    best = target.model(torch.from_numpy(rows).long()).logits.argmax(-1).numpy()
    greedy = [r for r in range(4) if heads_data.TEMPERATURES[r % 3] == 0]
    for r in range(4):
        same = bool((best[r, 8:-1] == rows[r, 9:]).all())
        assert same == (r in greedy)
    held = [t for name, t in texts(text) if held_out(name)]
    known = target.tokenizer.decode(read_tokens(target, text, held=False).tolist())
    plain = target.tokenizer.decode(np.load(trained / "work" / "text-000.npy").flatten().tolist())
    assert held
    assert "QQQQ" in held[0]
    assert "QQQQ" not in known + plain
    assert "QQQQ" in target.tokenizer.decode(read_tokens(target, text, held=True).tolist())


def test_every_row_comes_once_before_any_comes_again(trained: Path) -> None:
    rows = TrainingRows(trained / "work", (2, 3, 4))
    batches = rows.batches(2, seed=5)
    epoch = [next(batches) for _ in range(4)]
    got = sorted(row for tokens, _ in epoch for row in tokens.tolist())
    assert got == sorted(rows.tokens.tolist())
    tokens, states = epoch[0]
    at = rows.tokens.tolist().index(tokens[0].tolist())
    expected = np.concatenate(rows.states)[at].astype(np.float32)
    assert np.array_equal(states[0].numpy(), expected)


# Going on


def test_resuming_goes_on_from_the_step_and_the_weights_and_makes_no_data_again(
    trained: Path, target_path: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "head"
    shutil.copytree(trained, out)
    before = load_file(out / "work" / "head.safetensors")
    assert step_of(out) == 2

    def none(*_: object) -> None:
        raise AssertionError("the data was made again")

    monkeypatch.setattr(heads_data, "TextContinuer", none)
    monkeypatch.setattr(heads_data, "hidden_states", none)
    main(options(target_path, text, out, "--resume", "--lr=0"))
    after = load_file(out / "work" / "head.safetensors")
    assert step_of(out) == 4
    assert all(torch.equal(before[name], after[name]) for name in before)
    main(options(target_path, text, out, "--resume"))
    moved = load_file(out / "work" / "head.safetensors")
    assert step_of(out) == 6
    assert any(not torch.equal(before[name], moved[name]) for name in before)


def test_resuming_without_a_state_or_with_another_shape_is_refused(
    trained: Path, target_path: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    shutil.copytree(trained, out)
    with pytest.raises(ValueError, match="another shape"):
        main(options(target_path, text, out, "--resume", "--draft-vocab=50"))
    (out / "work" / "head.safetensors").unlink()
    with pytest.raises(ValueError, match="train without --resume first"):
        main(options(target_path, text, out, "--resume"))


# Bad input


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path, text: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json: give the directory of a Hugging Face causal LM"):
        main(options(tmp_path / "missing", text, tmp_path))


def test_a_target_that_scales_its_logits_is_refused(target_path: Path, tmp_path: Path) -> None:
    config = GraniteConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        logits_scaling=8.0,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    shutil.copy(target_path / "tokenizer.json", tmp_path)
    with pytest.raises(ValueError, match="scales, caps or shifts its logits"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--draft-vocab=300"], "--draft-vocab 300 must lie between 1 and 299"),
        (["--layers", "1", "2", "7"], "--layers 1 2 7: give different numbers from 0 to 6"),
        (["--layers", "1", "2", "2"], "--layers 1 2 2: give different numbers from 0 to 6"),
    ],
)
def test_a_head_that_cannot_be_is_refused_before_any_data_is_made(
    target_path: Path, text: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        main(options(target_path, text, tmp_path, *more))
    assert not list(tmp_path.rglob("*.npy"))


def test_too_few_layers_for_the_default_are_refused() -> None:
    with pytest.raises(ValueError, match="6 layers has no default for --layers"):
        default_layers(6)


def test_text_that_is_missing_or_too_short_is_refused(target_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text at"):
        list(texts(tmp_path))
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(ValueError, match="give more text"):
        read_tokens(load_target(target_path), tmp_path, held=False)


def test_a_single_file_is_cut_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_data, "PIECE", 5)
    (tmp_path / "a.txt").write_text("0123456789ab")
    assert list(texts(tmp_path / "a.txt")) == [("a.txt#0", "01234"), ("a.txt#1", "56789"), ("a.txt#2", "ab")]
