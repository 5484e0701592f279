"""Write a llama checkpoint as a GGUF file: write_gguf.py CHECKPOINT FILE KIND (F32, F16 or Q8_0).

As llama.cpp's convert_hf_to_gguf.py and its quantizer do: rows of q and k in ggml's rotary order, a byte-level BPE
vocabulary, one-dimensional tensors in F32. Needs gguf and numpy alone.
"""

import importlib
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("F32", "F16", "Q8_0")
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def read_safetensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and fp32 values. numpy has no bf16, so the file is read by hand. Raises ValueError for other dtypes."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    start = 8 + length
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        data = raw[start + first : start + last]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F32":
            values = np.frombuffer(data, np.float32)
        else:
            raise ValueError(f"{name} is {entry['dtype']}; only F32 and BF16 can be written as GGUF")
        yield name, values.reshape(entry["shape"])


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in ggml's order: it rotates neighbours, transformers the two halves of a head."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tensors(config: dict[str, Any], checkpoint: Path) -> Iterator[tuple[str, np.ndarray]]:
    """GGUF names and values. Raises ValueError for a tensor without a place in GGUF."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, values in read_safetensors(checkpoint / "model.safetensors"):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if name in TOP:
            yield TOP[name], values
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        place = IN_LAYER.get(rest.removesuffix(".weight"))
        if place is None:
            raise ValueError(f"{name} has no place in a GGUF file of a llama model")
        if place in heads:
            values = interleave(values, heads[place])
        yield f"blk.{layer}.{place}.weight", values


def vocabulary(gguf: Any, size: int, spec: dict[str, Any]) -> tuple[list[str], list[int]]:
    """(tokens, types) of all ids. Ids without a token in tokenizer.json are unused."""
    regular = {i: token for token, i in spec["model"]["vocab"].items()}
    special = {entry["id"]: entry["content"] for entry in spec["added_tokens"]}
    types = gguf.TokenType
    rows = []
    for i in range(size):
        if i in special:
            rows.append((special[i], types.CONTROL))
        else:
            rows.append((regular[i], types.NORMAL) if i in regular else (f"[PAD{i}]", types.UNUSED))
    return [token for token, _ in rows], [kind for _, kind in rows]


def add_config(writer: Any, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)


def add_tokenizer(gguf: Any, writer: Any, config: dict[str, Any], spec: dict[str, Any]) -> None:
    tokens, types = vocabulary(gguf, config["vocab_size"], spec)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = spec["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def add_tensor(gguf: Any, writer: Any, name: str, values: np.ndarray, kind: str) -> None:
    if kind == "Q8_0" and values.ndim == 2:
        form = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, form), raw_dtype=form)
    else:
        dtype = np.float16 if kind == "F16" and values.ndim == 2 else np.float32
        writer.add_tensor(name, np.ascontiguousarray(values.astype(dtype)))


def write(checkpoint: Path, file: Path, kind: str) -> None:
    """Raises ValueError for a model type other than llama."""
    gguf: Any = importlib.import_module("gguf")  # only its own environment has it
    importlib.import_module("gguf.quants")
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"{checkpoint} is a {config['model_type']} model; only llama can be written as GGUF")
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_file_type(gguf.LlamaFileType[{"F32": "ALL_F32"}.get(kind, f"MOSTLY_{kind}")])
    add_config(writer, config)
    add_tokenizer(gguf, writer, config, json.loads((checkpoint / "tokenizer.json").read_text("utf-8")))
    for name, values in tensors(config, checkpoint):
        add_tensor(gguf, writer, name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
