"""Small tokenizers in the shape of published families, made on the spot: the components are theirs, the tables tiny."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "def main(argv=None):\n    return 0\n",
    "the cat sat on the mat, the dog did not; it's 1234 and 56789 that we'll see",
    "naïve café, 12 €, λ → 日本語 🙂 don't DON'T",
    "नमस्ते नमस्ते नमस्ते 123 123 123",
    "<|user|> hello world <|end|>",
]

# Texts at which tokenizers part ways. JSON can bring all of them into a prompt.
ADVERSARIAL = [
    "",
    " ",
    "a",
    " a",
    "a ",
    "  two  spaces  ",
    "\n\n\n\t \r\n x\r\r",
    " \u00a0\u2003\u3000\u200b\ufeff wide",
    "it's we'LL DON'T I'm",
    "1 12 123 1234 12345678901234567890 3.14159 0x1F ½ ²",
    "नमस्ते 123नमस्ते",
    "for(i=0;i<10;++i){a[i]+=b->c;}\n\tif x:\n        return  x**2\n",
    "日本語のテキスト。中文字符，한국어",
    "🙂🙂👍🏽🏳️‍🌈👨‍👩‍👧‍👦🇩🇪",
    "e\u0301 \u0301\u0302\u0303 Z͑ͫa̴l̸g̵o",
    "\u1112\u1161\u11ab Å \u212b ﬁ ① ｆｕｌｌ",
    "שלום مرحبا \u202eabc\u202c",
    "\x00\x01\x07\x08\x1b\x7f\x80\x9f",
    "<s></s><unk><pad><0x41><0xF0><|im_start|>user<|im_end|> <|endoftext|> <bos>",
    "<|begin_of_text|><|eot_id|>a<|end_of_text|> <think>",
    "<s> </s>  <|end|>\n<|end|>   x",
    "< s > <|im_start| > <s</s>",
    "▁▁ ▁a ĠhelloĊ Â",
    "\ufffd�x\ufffe\U0010ffff",
    "𐍈 𝔘𝔫𝔦 𠜎",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 3,
    "the cat sat on the mat. " * 5,
]

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# As in later releases of the family: combining marks belong to the word before them.
QWEN35_SPLIT = QWEN2_SPLIT.replace(r"\p{L}\p{N}]?\p{L}+", r"\p{L}\p{N}]?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]+[", r"[^\s\p{L}\p{M}\p{N}]+["
)


def byte_level(specials: Sequence[str], pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=256 + 160, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return backend


def split(pattern: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def sentencepiece(
    specials: Sequence[str], *, normalizer: Any, pre_tokenizer: Any, strip: bool, with_bytes: bool = True
) -> Tokenizer:
    """A BPE over characters with ▁ for space and <0xNN> for the bytes of characters that it does not have."""
    seed = Tokenizer(models.BPE())
    seed.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    seed.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=150, show_progress=False))
    trained = json.loads(seed.to_str())["model"]
    names = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *trained["vocab"]]
    merges = [tuple(merge) for merge in trained["merges"]]
    backend = Tokenizer(
        models.BPE(
            {name: i for i, name in enumerate(dict.fromkeys(names))},
            merges,
            byte_fallback=with_bytes,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return backend


def begin_with(backend: Tokenizer, bos: str) -> None:
    """Add the template that puts `bos` before a text to the post-processor."""
    template = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, backend.token_to_id(bos))])
    own = backend.post_processor
    backend.post_processor = template if own is None else processors.Sequence([own, template])


SP = ("<unk>", "<s>", "</s>")
PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def llama2() -> Tokenizer:
    backend = sentencepiece(SP, normalizer=PREPEND, pre_tokenizer=None, strip=True)
    begin_with(backend, "<s>")
    return backend


def mistral() -> Tokenizer:
    first = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    backend = sentencepiece((*SP, "[INST]", "[/INST]"), normalizer=None, pre_tokenizer=first, strip=True)
    begin_with(backend, "<s>")
    return backend


def metaspace() -> Tokenizer:
    """The newer spelling of the decoder, which has no bytes: what it does not know is lost."""
    first = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    backend = sentencepiece(SP, normalizer=None, pre_tokenizer=first, strip=True, with_bytes=False)
    backend.decoder = decoders.Metaspace("▁", prepend_scheme="first", split=False)
    return backend


def phi3() -> Tokenizer:
    backend = sentencepiece(SP, normalizer=PREPEND, pre_tokenizer=None, strip=True)
    more = ("<|endoftext|>", "<|user|>", "<|end|>")
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False, rstrip=True) for s in more])
    backend.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return backend


def gemma() -> Tokenizer:
    spaces = pre_tokenizers.Split(" ", "merged_with_previous")
    specials = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
    backend = sentencepiece(specials, normalizer=normalizers.Replace(" ", "▁"), pre_tokenizer=spaces, strip=False)
    begin_with(backend, "<bos>")
    return backend


def llama3(bos: str = "<|begin_of_text|>") -> Tokenizer:
    backend = byte_level((bos, "<|end_of_text|>", "<|eot_id|>"), split(LLAMA3_SPLIT))
    begin_with(backend, bos)
    return backend


def qwen(pattern: str) -> Tokenizer:
    backend = byte_level(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), split(pattern), normalizers.NFC())
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return backend


def gpt2(specials: Sequence[str], *, digits: bool) -> Tokenizer:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    steps = [pre_tokenizers.Digits(individual_digits=True), plain] if digits else [plain]
    return byte_level(specials, pre_tokenizers.Sequence(steps))


# Name → (tokenizer, the rest of tokenizer_config.json).
FAMILIES: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any]]] = {
    "llama2": (llama2, {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}),
    "llama3": (llama3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    # Checkpoints distilled into Llama 3 name Llama 2's class.
    "llama3 by another class": (
        llama3,
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "mistral": (mistral, {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}),
    "qwen2": (
        partial(qwen, QWEN2_SPLIT),
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
    "qwen3": (
        partial(qwen, QWEN35_SPLIT),
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
    # A checkpoint of that class whose own pre-tokenizer groups digits.
    "qwen2 with another split": (partial(qwen, LLAMA3_SPLIT), {"tokenizer_class": "Qwen2Tokenizer"}),
    "gemma": (gemma, {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>"}),
    "metaspace": (metaspace, {"bos_token": "<s>", "eos_token": "</s>"}),
    "phi3": (
        phi3,
        {
            "tokenizer_class": "LlamaTokenizer",
            "bos_token": "<s>",
            "eos_token": "<|endoftext|>",
            "add_bos_token": False,
            "add_eos_token": False,
        },
    ),
    "olmo2": (
        partial(gpt2, ("<|endoftext|>", "<|pad|>"), digits=False),
        {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
    ),
    "smollm3": (partial(llama3, "<|im_start|>"), {"bos_token": "<|im_start|>", "eos_token": "<|eot_id|>"}),
    "granite": (
        partial(gpt2, ("<|end_of_text|>", "<|start_of_role|>"), digits=True),
        {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end_of_text|>", "add_bos_token": False},
    ),
}


def save_family(name: str, directory: Path, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json. config: fields that differ from the family's; None: left out."""
    make, common = FAMILIES[name]
    directory.mkdir(parents=True, exist_ok=True)
    make().save(str(directory / "tokenizer.json"))
    fields = {key: value for key, value in {**common, **config}.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields), "utf-8")
    return directory
