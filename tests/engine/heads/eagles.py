"""Tiny EAGLE heads in every published format, and a slow reference that computes them from the files alone."""

import json
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.trees import Parents
from tests.engine.pairs import VOCAB, Pair, Shape, random_model, reference_model, save_tokenizer

HIDDEN, HEADS, INNER = 64, 4, 96
LAYERS = 6
READ = (1, 3, 5)  # layers of the target
EPS = 1e-6
THETA = 10000.0
FORMATS = ("safeailab", "speculators", "eagle", "small vocabulary", "deep")


def save_target(directory: Path, writes: float = 0.01) -> str:
    """A random target whose layers write little beside the embedding, so that a head made by hand agrees at times."""
    model = random_model(Shape(layers=LAYERS), seed=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(writes)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)


def head_tensors(kind: str, seed: int = 4) -> dict[str, Tensor]:
    """A head that copies the embedding of its token to its output, with noise on everything."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, scale: float = 0.02) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    eye, zero = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    eagle3 = kind != "eagle"
    copied = torch.cat([eye, zero], 1) if eagle3 else eye
    sharp = 3.0 if eagle3 else 20.0  # a row attends to rows of its own token: a first layer of EAGLE has no norm
    width = 2 * HIDDEN if eagle3 else HIDDEN
    tensors = {
        "fc.weight": noise(HIDDEN, 3 * HIDDEN)
        if eagle3
        else torch.cat([eye, zero], 1) + noise(HIDDEN, 2 * HIDDEN, scale=0.004),
        "L.self_attn.q_proj.weight": sharp * copied + noise(HIDDEN, width),
        "L.self_attn.k_proj.weight": sharp * copied + noise(HIDDEN, width),
        "L.self_attn.v_proj.weight": copied + noise(HIDDEN, width),
        "L.self_attn.o_proj.weight": eye + noise(HIDDEN, HIDDEN),
        "L.mlp.gate_proj.weight": noise(INNER, HIDDEN, scale=0.05),
        "L.mlp.up_proj.weight": noise(INNER, HIDDEN, scale=0.05),
        "L.mlp.down_proj.weight": noise(HIDDEN, INNER, scale=0.05),
        "L.post_attention_layernorm.weight": 1 + noise(HIDDEN),
    }
    if eagle3:
        norms = ("L.input_layernorm.weight", "L.hidden_norm.weight", "norm.weight")
        tensors |= {name: 1 + noise(HIDDEN) for name in norms}
        if kind == "speculators":  # its normed state is the residual
            tensors["L.hidden_norm.weight"] *= 0.2
    else:
        tensors["fc.bias"] = noise(HIDDEN, scale=0.004)
    return tensors


def save_head(directory: Path, target: str, kind: str, **changes: Any) -> str:
    """Write a head of one of FORMATS. changes: fields of config.json that differ."""
    directory.mkdir(parents=True, exist_ok=True)
    layer = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2 if kind == "deep" else 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 64,
        "vocab_size": VOCAB,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }
    ids = {"eagle_aux_hidden_state_layer_ids": list(READ)}
    config: dict[str, Any]
    if kind == "speculators":
        config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "draft_vocab_size": VOCAB,
            **ids,
        }
    elif kind == "eagle":
        config = {"architectures": ["LlamaForCausalLM"], **layer}
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, "draft_vocab_size": VOCAB, "eagle_config": ids}
    names = head_tensors(kind)
    prefix = "midlayer" if kind in ("safeailab", "small vocabulary") else "layers.0"
    tensors = {name.replace("L.", f"{prefix}.", 1) if name.startswith("L.") else name: t for name, t in names.items()}
    embedding, output = target_tables(target)
    if kind == "speculators":
        tensors |= {"embed_tokens.weight": embedding.clone(), "lm_head.weight": output + 0.01}
        tensors |= {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    if kind == "small vocabulary":
        chosen = torch.arange(1, VOCAB, 2)
        tensors |= {"lm_head.weight": output[chosen].clone(), "d2t": chosen - torch.arange(len(chosen))}
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True)
        config["draft_vocab_size"] = len(chosen)
    if kind == "deep":
        second = head_tensors("eagle", seed=9)
        tensors |= {name.replace("L.", "layers.1.", 1): 0.3 * t for name, t in second.items() if name.startswith("L.")}
        tensors["layers.1.input_layernorm.weight"] = torch.ones(HIDDEN)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**config, **changes}), "utf-8")
    return str(directory)


def rewrite(head: str, *dropped: str, **tensors: Tensor) -> None:
    """Replace or add tensors of a saved head, and leave out `dropped`."""
    file = Path(head) / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if name not in dropped}
    save_file({**kept, **{name: tensor.contiguous() for name, tensor in tensors.items()}}, file)


def save_eagle_pair(folder: Path, kind: str = "safeailab") -> Pair:
    target = save_target(folder / "target")
    return Pair(target, save_head(folder / "head", target, kind))


def target_tables(target: str) -> tuple[Tensor, Tensor]:
    """(embedding, head) of a saved target, fp32."""
    tensors = load_file(Path(target) / "model.safetensors")
    return tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]


@dataclass(slots=True)
class Rows:
    """The rows that a head has computed for one sequence: what it would keep as keys and values, and its outputs."""

    inputs: list[Tensor] = field(default_factory=list)  # of the first layer's attention [width]
    residuals: list[Tensor] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # rotary position of each row
    seen: list[set[int]] = field(default_factory=list)  # rows that each row attends to


class SlowHead:
    """Computes every row of a head anew for each question, one after the other, in fp64."""

    def __init__(self, pair: Pair) -> None:
        self.config = json.loads((Path(pair.draft) / "config.json").read_text("utf-8"))
        self.tensors = {n: t.double() for n, t in load_file(Path(pair.draft) / "model.safetensors").items()}
        self.target = reference_model(pair.target)
        self.first = "midlayer" if "midlayer.mlp.up_proj.weight" in self.tensors else "layers.0"
        self.eagle3 = any(name.endswith("hidden_norm.weight") for name in self.tensors)
        self.norm_residual = self.config.get("norm_before_residual", "speculators_model_type" in self.config)
        self.norm_output = bool(self.config.get("norm_output"))
        self.norm_before_fuse = bool(self.config.get("norm_before_fc"))
        layer = self.config.get("transformer_layer_config", self.config)
        self.heads, self.kv_heads = layer["num_attention_heads"], layer["num_key_value_heads"]
        self._latest: tuple[list[int], Tensor] = [], torch.empty(0)
        embedding, output = (t.double() for t in target_tables(pair.target))
        self.embedding = self.tensors.get("embed_tokens.weight", embedding)
        self.output = self.tensors.get("lm_head.weight", output)
        shift = self.tensors.get("d2t", torch.zeros(len(self.output))).long()
        self.ids = shift + torch.arange(len(shift))  # the target's id of each token

    def states(self, tokens: list[int]) -> Tensor:
        """The target's states [len(tokens), width] of one text."""
        if self._latest[0] != tokens:
            with torch.inference_mode():
                out = self.target(torch.tensor([tokens]), output_hidden_states=True)
            layers = READ if self.eagle3 else (LAYERS,)
            self._latest = list(tokens), torch.cat([out.hidden_states[layer][0] for layer in layers], 1)
        return self._latest[1]

    def logits(self, tokens: list[int], start: int, drafts: Seq[int] = (), parents: Parents | None = None) -> Tensor:
        """Logits [1 + len(drafts), target vocab] behind the committed tokens and behind each draft. The head begins at
        position `start`; drafts are a chain, or the nodes of a tree."""
        shape = tuple(range(-1, len(drafts) - 1)) if parents is None else parents
        states = self.states(tokens[:-1])[start:]
        entries = tokens[start + 1 :]
        rows = Rows()
        outputs: list[Tensor] = []
        for j, (token, state) in enumerate(zip(entries, states, strict=True)):
            g = self._fuse(state) if self.eagle3 else state
            self._append(rows, token, g, j, set(range(j)))
        for node, token in enumerate(drafts):
            outputs = self._compute(rows)
            last = len(entries) - 1
            parent = last if shape[node] < 0 else last + 1 + shape[node]
            g = self._norm(outputs[parent], "norm.weight") if self.norm_output else outputs[parent]
            self._append(rows, token, g, rows.depths[parent] + 1, rows.seen[parent])
        outputs = self._compute(rows)[len(entries) - 1 :]
        hidden = torch.stack([self._norm(h, "norm.weight") if self.eagle3 else h for h in outputs])
        full = torch.full((len(outputs), VOCAB), -1e4, dtype=torch.float64)
        full[:, self.ids] = hidden @ self.output.T
        return full

    def chain(self, tokens: list[int], start: int, k: int) -> list[int]:
        """The greedy chain of k drafts."""
        drafts: list[int] = []
        for _ in range(k):
            drafts.append(int(self.logits(tokens, start, drafts)[-1].argmax()))
        return drafts

    def _fuse(self, state: Tensor) -> Tensor:
        fused = self._norm(state, "input_norm.weight") if self.norm_before_fuse else state
        return self.tensors["fc.weight"] @ fused

    def _append(self, rows: Rows, token: int, g: Tensor, depth: int, before: set[int]) -> None:
        embedded = self.embedding[token]
        if self.eagle3:
            normed = self._norm(g, f"{self.first}.hidden_norm.weight")
            rows.inputs.append(torch.cat([self._norm(embedded, f"{self.first}.input_layernorm.weight"), normed]))
            rows.residuals.append(normed if self.norm_residual else g)
        else:
            fused = self.tensors["fc.weight"] @ torch.cat([embedded, g]) + self.tensors["fc.bias"]
            rows.inputs.append(fused)
            rows.residuals.append(fused)
        rows.depths.append(depth)
        rows.seen.append(before | {len(rows.seen)})

    def _compute(self, rows: Rows) -> list[Tensor]:
        x = self._layer(self.first, rows, rows.inputs)
        if "layers.1.mlp.up_proj.weight" in self.tensors:
            inputs = [self._norm(row, "layers.1.input_layernorm.weight") for row in x]
            later = Rows(inputs, x, rows.depths, rows.seen)
            x = self._layer("layers.1", later, inputs)
        return x

    def _layer(self, name: str, rows: Rows, inputs: list[Tensor]) -> list[Tensor]:
        packed = [torch.stack(inputs) @ self.tensors[f"{name}.self_attn.{p}_proj.weight"].T for p in "qkv"]
        size = packed[0].shape[1] // self.heads
        q, k, v = (x.view(len(inputs), -1, size) for x in packed)
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        q, k = rotated(q, rows.depths), rotated(k, rows.depths)
        outputs = []
        for i, residual in enumerate(rows.residuals):
            seen = sorted(rows.seen[i])
            scores = torch.einsum("hd,nhd->hn", q[i], k[seen]) / math.sqrt(size)
            attended = torch.einsum("hn,nhd->hd", scores.softmax(-1), v[seen]).flatten()
            a = residual + self.tensors[f"{name}.self_attn.o_proj.weight"] @ attended
            normed = self._norm(a, f"{name}.post_attention_layernorm.weight")
            up = self.tensors[f"{name}.mlp.up_proj.weight"] @ normed
            gate = F.silu(self.tensors[f"{name}.mlp.gate_proj.weight"] @ normed)
            outputs.append(a + self.tensors[f"{name}.mlp.down_proj.weight"] @ (gate * up))
        return outputs

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape, self.tensors[name], EPS)


def rotated(x: Tensor, positions: list[int]) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864) as Llama has them: the two halves of a head are pairs."""
    half = x.shape[-1] // 2
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * THETA ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
