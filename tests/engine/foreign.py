"""A draft whose tokenizer is another: other ids, fewer merges, tokens of its own, a text that begins with its BOS."""

import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.engine.pairs import edit_json

TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def save_foreign(checkpoint: str, directory: Path, *, dropped: int = 0, bos: bool = False, seed: int = 0) -> str:
    """A copy with every token but the two special ones under another id. `dropped`: merges that it does not have, and
    as many tokens that only it has. bos: its texts begin with BOS."""
    path = Path(shutil.copytree(checkpoint, directory))
    tensors = load_file(path / "model.safetensors")
    rows = len(tensors[TABLES[0]])
    moved = list(range(2, rows))
    random.Random(seed).shuffle(moved)
    new_id = torch.tensor([0, 1, *moved])  # by the old id
    for name in TABLES:
        tensors[name] = torch.empty_like(tensors[name]).index_copy_(0, new_id, tensors[name])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    _rename(path, new_id.tolist(), dropped)
    if bos:
        edit_json(path / "tokenizer_config.json", add_bos_token=True)
    return str(path)


def _rename(path: Path, new_id: list[int], dropped: int) -> None:
    content = json.loads((path / "tokenizer.json").read_text("utf-8"))
    model = content["model"]
    gone = set(sorted(model["vocab"], key=model["vocab"].__getitem__)[len(model["vocab"]) - dropped :])
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in gone]
    model["vocab"] = {f"zq{s}" if s in gone else s: new_id[i] for s, i in model["vocab"].items()}
    (path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
