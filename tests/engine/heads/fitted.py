"""Small heads that are right now and then: random blocks, and output matrices fitted to texts that the target wrote.

Their reference forwards are written here, one row and one head at a time.
"""

import json
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.drafters.base import Draft, DraftBatch
from engine.engine import Engine
from engine.heads.medusa import load_medusa
from engine.heads.mlp_speculator import load_mlp_speculator
from engine.heads.state_drafter import StateDrafter
from engine.heads.state_heads import StateHeads, StateTarget
from engine.heads.states import TargetStates
from engine.loading.load import load_models
from engine.models.decoder import Decoder
from engine.models.loader import load_decoder, open_checkpoint
from engine.trees import ROOT, Parents
from engine.types import Request, SamplingParams
from policies.config import PolicyConfig
from tests.engine.driving import drive, load
from tests.engine.pairs import VOCAB, Pair, reference_model
from tests.kv import kv_config

CPU = torch.device("cpu")
HIDDEN, INNER, HEADS, BLOCKS = 64, 48, 4, 2
SHARPNESS = 8.0  # of fitted logits
RIDGE = 0.3

Tensors = dict[str, Tensor]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def load_target(checkpoint: str) -> tuple[Decoder, StateTarget]:
    """A target in fp64, and what heads need to know of it."""
    opened = open_checkpoint(checkpoint)
    decoder = load_decoder(opened, dtype=torch.float64, device=CPU, max_len=96)
    return decoder, StateTarget("the target", decoder.config, decoder.head)


class ReferenceTarget:
    """transformers' own module: states behind the final norm."""

    def __init__(self, checkpoint: str) -> None:
        self.model = reference_model(checkpoint)

    @torch.no_grad()
    def states(self, tokens: Seq[int]) -> Tensor:
        """[tokens, hidden]"""
        output = self.model(torch.tensor([list(tokens)]), output_hidden_states=True)
        states: Tensor = output.hidden_states[-1][0]
        return states

    def last_state(self, tokens: Seq[int]) -> Tensor:
        """[hidden] of position n − 2 of n tokens."""
        return self.states(tokens[:-1])[-1]


class ReferenceMedusa:
    """Medusa heads by the formula of the paper's section 2.1."""

    def __init__(self, tensors: Tensors, heads: int, blocks: int) -> None:
        self.tensors, self.most, self.blocks = tensors, heads, blocks

    def hidden(self, head: int, state: Tensor) -> Tensor:
        x = state
        for n in range(self.blocks):
            y = self.tensors[f"{head}.{n}.linear.weight"] @ x + self.tensors[f"{head}.{n}.linear.bias"]
            x = x + y * torch.sigmoid(y)
        return x

    def path_logits(self, state: Tensor, tokens: Seq[int]) -> Tensor:
        """[vocab] behind a path of drafts; `tokens` begins with the last committed token."""
        head = len(tokens) - 1
        return self.tensors[f"{head}.{self.blocks}.weight"] @ self.hidden(head, state)


class ReferenceMLP:
    """An MLP speculator by its formula, for weights that are not tied."""

    def __init__(self, tensors: Tensors, count: int, *, scale_input: bool = False) -> None:
        self.tensors, self.most, self.scale_input = tensors, count, scale_input

    def get(self, part: str, step: int, kind: str = "weight") -> Tensor:
        return self.tensors[f"speculator.{part}.{step}.{kind}"]

    def state(self, state: Tensor, tokens: Seq[int]) -> Tensor:
        """[inner] behind these tokens, the first of which is committed."""
        if self.scale_input:
            state = state / (state.square().mean() + 1e-6).sqrt() / 2**0.5
        for step, token in enumerate(tokens):
            weight = 0.5 ** (0.5 / self.most)
            inner = len(self.get("ln", step))
            other = ((1 - weight**2) * (inner / 2)) ** 0.5
            x = self.get("proj", step) @ state * weight + self.get("emb", step)[token] * other
            x = x / (x.square().mean() + 1e-6).sqrt() * self.get("ln", step) + self.get("ln", step, "bias")
            state = x * 0.5 * (1 + torch.erf(x / 2**0.5))
        return state

    def path_logits(self, state: Tensor, tokens: Seq[int]) -> Tensor:
        """As ReferenceMedusa.path_logits."""
        return self.get("head", len(tokens) - 1) @ self.state(state, tokens)


Reference = ReferenceMedusa | ReferenceMLP


def random_medusa(vocab: int = VOCAB, heads: int = HEADS, blocks: int = BLOCKS, hidden: int = HIDDEN) -> Tensors:
    tensors: Tensors = {}
    for h in range(heads):
        for n in range(blocks):
            tensors[f"{h}.{n}.linear.weight"] = randn(hidden, hidden, seed=10 * h + n) / hidden**0.5
            tensors[f"{h}.{n}.linear.bias"] = 0.1 * randn(hidden, seed=100 + 10 * h + n)
        tensors[f"{h}.{blocks}.weight"] = randn(vocab, hidden, seed=200 + h) / hidden**0.5
    return tensors


def random_mlp(vocab: int = VOCAB, count: int = 3, hidden: int = HIDDEN, inner: int = INNER) -> Tensors:
    tensors: Tensors = {}
    for n in range(count):
        width = inner if n else hidden
        tensors[f"speculator.emb.{n}.weight"] = randn(vocab, inner, seed=n)
        tensors[f"speculator.proj.{n}.weight"] = randn(inner, width, seed=10 + n) / width**0.5
        tensors[f"speculator.ln.{n}.weight"] = 1 + 0.1 * randn(inner, seed=20 + n)
        tensors[f"speculator.ln.{n}.bias"] = 0.1 * randn(inner, seed=30 + n)
        tensors[f"speculator.head.{n}.weight"] = randn(vocab, inner, seed=40 + n) / inner**0.5
    return tensors


def fit(features: Tensor, tokens: list[int]) -> Tensor:
    """An output matrix [vocab, width] that is often right about these tokens [n] behind these features [n, width]."""
    wanted = SHARPNESS * F.one_hot(torch.tensor(tokens), VOCAB).double()
    gram = features.T @ features + RIDGE * torch.eye(features.shape[1], dtype=torch.float64)
    return torch.linalg.solve(gram, features.T @ wanted).T.contiguous()


def fit_medusa(target: ReferenceTarget, texts: Seq[list[int]]) -> ReferenceMedusa:
    heads = ReferenceMedusa(random_medusa(), HEADS, BLOCKS)
    states = [target.states(text) for text in texts]
    for h in range(HEADS):
        places = [(n, t) for n, text in enumerate(texts) for t in range(len(text) - 2 - h)]
        features = torch.stack([heads.hidden(h, states[n][t]) for n, t in places])
        heads.tensors[f"{h}.{BLOCKS}.weight"] = fit(features, [texts[n][t + 2 + h] for n, t in places])
    return heads


def fit_mlp(target: ReferenceTarget, texts: Seq[list[int]], count: int = 3) -> ReferenceMLP:
    heads = ReferenceMLP(random_mlp(count=count), count)
    states = [target.states(text) for text in texts]
    for h in range(count):
        places = [(n, t) for n, text in enumerate(texts) for t in range(len(text) - 2 - h)]
        features = torch.stack([heads.state(states[n][t], texts[n][t + 1 : t + 2 + h]) for n, t in places])
        heads.tensors[f"speculator.head.{h}.weight"] = fit(features, [texts[n][t + 2 + h] for n, t in places])
    return heads


def save_heads(directory: Path, tensors: Tensors, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return directory


def mlp_config(count: int = 3, hidden: int = HIDDEN, inner: int = INNER, **changes: Any) -> dict[str, Any]:
    sizes = {"n_predict": count, "emb_dim": hidden, "inner_dim": inner, "vocab_size": VOCAB}
    names = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}
    return {**names, **sizes, "tie_weights": False, "scale_input": False, **changes}


def load_heads(directory: Path, target: StateTarget) -> StateHeads:
    loader = load_medusa if "medusa" in directory.name else load_mlp_speculator
    return loader(directory, target, dtype=torch.float64, device=CPU)


def heads_engine(checkpoint: str, directory: Path, **config: Any) -> Engine:
    """An engine whose only drafter is that of these heads, under the name `model`."""
    settings = {"dtype": "float64", "max_model_len": 96, "policy": PolicyConfig("fixed", k=3), **kv_config(), **config}
    full = EngineConfig(target=checkpoint, **settings)
    models = load_models(full)
    target = models.target
    layer = target.decoder.config.num_layers
    states = TargetStates((layer,), {"model"}, max_rows=10_000)
    target.reader = states
    assert isinstance(target.decoder, Decoder)
    heads = load_heads(directory, StateTarget("the target", target.decoder.config, target.decoder.head))
    drafter = StateDrafter(heads, states, target.vocab_size, CPU)
    return Engine(full, target, drafter, models.tokenizer, models.eos_ids, ("model",))


def make_requests(
    temperature: float = 0.0, k: int | None = 3, count: int = 8, max_tokens: int = 12, **changes: Any
) -> list[Request]:
    """Prompts of 1 to 30 tokens."""
    rng, requests = random.Random(4), []
    for n in range(count):
        prompt = tuple(rng.randrange(2, VOCAB) for _ in range(1 + n * 29 // max(1, count - 1)))
        params = SamplingParams(temperature=temperature, seed=n, max_tokens=max_tokens, ignore_eos=True)
        requests.append(Request(f"r{n}", prompt, params, k, **{"drafter": "model", **changes}))
    return requests


@dataclass(frozen=True)
class Fitted:
    """A target, heads for it in a directory, and their references."""

    checkpoint: str
    directory: Path
    target: ReferenceTarget
    heads: Reference

    def engine(self, **config: Any) -> Engine:
        return heads_engine(self.checkpoint, self.directory, **config)

    def greedy(self, tokens: Seq[int], parents: Parents) -> list[int]:
        """The drafts at temperature 0 behind committed tokens: of siblings the likeliest tokens in their order."""
        state, drafts, ranks = self.target.last_state(tokens), list[int](), dict[int, int]()
        for parent in parents:
            path, node = list[int](), parent
            while node != ROOT:
                path.insert(0, drafts[node])
                node = parents[node]
            rank = ranks[parent] = ranks.get(parent, -1) + 1
            order = self.heads.path_logits(state, [tokens[-1], *path]).argsort(descending=True)
            drafts.append(int(order[rank]))
        return drafts


class Recorder:
    """Keeps what an engine's drafter proposes at temperature 0: (tokens, parents, drafts) of each draft."""

    def __init__(self, engine: Engine) -> None:
        self.seen: list[tuple[tuple[int, ...], Parents, list[int]]] = []
        propose = engine.drafter.propose

        def recording(batch: DraftBatch, ks: Seq[int]) -> Draft:
            draft = propose(batch, ks)
            for i, (sequence, k) in enumerate(zip(batch.sequences, draft.ks, strict=True)):
                if k and not sequence.params.temperature and draft.tokens is not None:
                    parents = draft.trees.get(i, tuple(range(-1, k - 1)))
                    self.seen.append((tuple(sequence.tokens), parents, draft.tokens[i, :k].tolist()))
            return draft

        engine.drafter.propose = recording  # type: ignore[method-assign]

    def check(self, fitted: Fitted) -> int:
        """Compare all drafts with the reference's. Returns their number."""
        for tokens, parents, drafts in self.seen:
            assert drafts == fitted.greedy(tokens, parents), f"behind {len(tokens)} tokens"
        return sum(len(drafts) for _, _, drafts in self.seen)


def written(pair: Pair) -> list[list[int]]:
    """Texts of the target: the prompts of make_requests with what follows at two temperatures."""
    engine = load(pair)
    texts = []
    for temperature in (0.0, 0.8):
        requests = make_requests(temperature, k=0, max_tokens=24, drafter=None)
        run = drive(engine, requests)
        texts += [[*r.prompt_ids, *run.tokens[r.id]] for r in requests]
    return texts
