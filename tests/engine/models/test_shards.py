"""Files of weights that are truncated, malformed or elsewhere are refused by name. Whole ones are read bit for bit."""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config import ConfigError
from engine.models import shards
from engine.models.blocks import block
from engine.models.products import QUANTISE
from engine.models.quantize import SLICE_ROWS, CodedWeight, Sliced, quantise_weight
from engine.models.shards import MOST_PLACES, TRIMS, Part, Shards, StoredWeight, TensorSource
from engine.models.weight_files import INDEX, WEIGHTS

CPU = torch.device("cpu")
TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.randn(5, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "c": torch.arange(4, dtype=torch.int32).reshape(1, 4, 1),
    "d": torch.tensor(2.5, dtype=torch.float16),
    "e": torch.empty(0, 3),
    "f": torch.tensor([[1.5, -2.0]]).to(torch.float8_e4m3fn),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of two files with an index."""
    halves = {"one.safetensors": ["a", "c", "e"], "two.safetensors": ["b", "d", "f"]}
    for file, names in halves.items():
        save_file({n: TENSORS[n] for n in names}, tmp_path / file, metadata={"format": "pt"})
    write_index(tmp_path, {n: file for file, names in halves.items() for n in names})
    return tmp_path


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}), "utf-8")


def refused(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        Shards(directory)
    return str(caught.value)


def write_header(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def test_every_dtype_and_shape_is_read_bit_for_bit(directory: Path) -> None:
    shards = Shards(directory)
    assert shards.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        found = shards.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert bytes(found.reshape(-1).view(torch.uint8).numpy()) == bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def test_a_tensor_read_stays_when_its_file_goes(directory: Path) -> None:
    """A mapped tensor would end the process here."""
    tensor = Shards(directory).read("a")
    os.truncate(directory / "one.safetensors", 0)
    assert tensor.tolist() == TENSORS["a"].tolist()


def test_one_file_is_open_at_a_time(directory: Path) -> None:
    def opened() -> list[str]:
        links = [
            os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n.isdecimal() and _is_open(n)
        ]
        return [Path(link).name for link in links if Path(link).parent == directory]

    shards = Shards(directory)
    assert opened() == []
    for name, file in (("a", "one.safetensors"), ("c", "one.safetensors"), ("b", "two.safetensors")):
        shards.read(name)
        assert opened() == [file]
    del shards
    assert opened() == []


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_the_reader_converts_and_checks_shapes(directory: Path) -> None:
    read = TensorSource(Shards(directory), torch.float64, CPU, lambda name: None).read
    assert read("b", (5,)).tolist() == TENSORS["b"].double().tolist()
    with pytest.raises(ConfigError, match=r"a has shape \(2, 3\), config.json says \(3, 2\)"):
        read("a", (3, 2))
    with pytest.raises(ConfigError, match="holds no tensor 'z'"):
        read("z", (1,))


def test_a_dtype_that_is_not_known_is_refused_when_it_is_read(tmp_path: Path) -> None:
    write_header(tmp_path / WEIGHTS, entry(dtype="F4"), bytes(8))
    with pytest.raises(ConfigError, match="a has dtype F4; supported are F64"):
        Shards(tmp_path).read("a")


BROKEN_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda f: f.write_bytes(b""), "the header's length is 0 bytes, the file's 0"),
    "no header": (lambda f: f.write_bytes(b"PK\x03\x04" + bytes(30) + b"\xff" * 99), "truncated or no safetensors"),
    "a header longer than the file": (lambda f: write_header(f, entry(), bytes(8), 10_000), "length is 10,000 bytes"),
    "a header that is no JSON": (lambda f: f.write_bytes((4).to_bytes(8, "little") + b"{a:b"), "no safetensors file"),
    "a header that is a list": (lambda f: write_header(f, [1]), "no safetensors file"),
    "truncated data": (lambda f: write_header(f, entry(), bytes(7)), "is truncated: its header names"),
    "bytes that do not fit the shape": (lambda f: write_header(f, entry(shape=[3]), bytes(8)), "has 8 bytes"),
    "bytes before the data": (lambda f: write_header(f, entry(data_offsets=[-8, 0]), bytes(8)), "at bytes -8 to 0"),
    "a negative shape": (lambda f: write_header(f, entry(shape=[-1, -2]), bytes(8)), r"shape (-1, -2)"),
    "offsets that are no integers": (
        lambda f: write_header(f, entry(data_offsets=[0.0, 8.0]), bytes(8)),
        "no safetensors file",
    ),
    "a header that is too deep": (
        lambda f: f.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000),
        "no safetensors file",
    ),
    "a shape beyond all memory": (
        lambda f: write_header(f, entry(shape=[10**30, 0], data_offsets=[0, 0])),
        "a tensor of shape (1000000000000000000000000000000, 0) lies at",
    ),
    "offsets beyond all files": (lambda f: write_header(f, entry(data_offsets=[0, 10**30])), "no safetensors file"),
    "an entry without a shape": (lambda f: write_header(f, {"a": {"dtype": "F32"}}), "no safetensors file"),
}


@pytest.mark.parametrize("name", sorted(BROKEN_FILES))
def test_broken_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    damage, reason = BROKEN_FILES[name]
    damage(tmp_path / WEIGHTS)
    message = refused(tmp_path)
    assert str(tmp_path / WEIGHTS) in message
    assert reason in message


def test_a_file_cut_short_while_it_is_read_is_refused(directory: Path) -> None:
    shards = Shards(directory)
    file = directory / "two.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    last = max(
        (n for n, stored in shards.tensors.items() if stored.file == file), key=lambda n: shards.tensors[n].start
    )
    with pytest.raises(ConfigError, match=r"two\.safetensors became shorter"):
        shards.read(last)


@pytest.mark.parametrize("most", [10**9, 1000, 7])
def test_rows_are_read_to_their_places_whatever_a_call_of_the_system_reads(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than one call takes, and calls that read less than they are asked for."""

    def reluctant(descriptor: int, places: list[memoryview], offset: int) -> int:
        counts.append(sum(map(len, places)))
        return preadv(descriptor, [place[:most] for place in places[:1]] if most < 10**9 else places, offset)

    preadv, counts = os.preadv, list[int]()
    table, order = torch.arange(2.0 * MOST_PLACES + 6).double().reshape(-1, 2), torch.randperm(MOST_PLACES + 3)
    save_file({"a": table, "b": table.flip(0).contiguous()}, tmp_path / WEIGHTS)
    monkeypatch.setattr(os, "preadv", reluctant)
    parts = [Part("b", tuple(table.shape), order), Part("a", tuple(table.shape))]
    weight = TensorSource(Shards(tmp_path), torch.float64, CPU, lambda name: None).weight(parts)
    assert isinstance(weight, StoredWeight)
    expected = torch.cat([table.flip(0)[order], table])
    assert (weight.shape, weight.nbytes) == (expected.shape, expected.nbytes)
    assert not counts  # nothing is read yet
    assert torch.equal(weight.read(), expected)
    assert torch.equal(weight.passing(), expected)
    assert len(counts) >= 6


def test_a_weight_passes_through_memory_that_its_thread_uses_again(tmp_path: Path) -> None:
    sizes = {"large": 100, "small": 3, "medium": 9, **{f"rest {n}": 20 for n in range(40)}}
    save_file({name: torch.full((size, 2), float(size)) for name, size in sizes.items()}, tmp_path / WEIGHTS)
    source = TensorSource(Shards(tmp_path), torch.float32, CPU, lambda name: None)

    def read(name: str) -> Tensor:
        weight = source.weight([Part(name, (sizes[name], 2))])
        assert isinstance(weight, StoredWeight)
        passing = weight.passing()
        assert torch.equal(passing, torch.full((sizes[name], 2), float(sizes[name])))
        assert weight.read().data_ptr() != passing.data_ptr()
        return passing

    medium, small, large, other = (read(name) for name in ("medium", "small", "large", "large"))
    assert small.data_ptr() == medium.data_ptr()
    assert len({large.data_ptr(), other.data_ptr(), medium.data_ptr()}) == 3  # more than the share is not kept
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(read, "small").result().data_ptr() != medium.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantise", QUANTISE.values(), ids=QUANTISE)
def test_a_weight_that_is_rounded_as_it_is_read_has_the_bits_of_the_whole(
    quantise: Callable[[Tensor | Sliced], CodedWeight], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Also where its rows come in another order, and where a part ends within what is read at once."""
    generator = torch.Generator().manual_seed(1)
    tables = {name: torch.randn(rows, 72, generator=generator) for name, rows in {"a": 700, "b": 90, "c": 1100}.items()}
    save_file(tables, tmp_path / WEIGHTS)
    orders = {"a": torch.randperm(700, generator=generator), "b": None, "c": None}
    parts = [Part(name, tuple(table.shape), orders[name]) for name, table in tables.items()]
    weight = TensorSource(Shards(tmp_path), dtype, CPU, lambda name: None).weight(parts)
    assert isinstance(weight, StoredWeight)
    whole, sliced = quantise(weight.read()), quantise(weight)
    assert sliced.codes.shape[0] == 1890
    assert torch.equal(sliced.codes.float(), whole.codes.float())
    assert torch.equal(sliced.steps, whole.steps)
    assert sliced.offsets is None if whole.offsets is None else torch.equal(cast(Tensor, sliced.offsets), whole.offsets)
    again = quantise(whole)  # codes that are rounded anew, as a checkpoint of other codes is
    from_numbers = quantise(whole.numbers(torch.float32))
    assert torch.equal(again.codes.float(), from_numbers.codes.float())
    assert torch.equal(again.steps, from_numbers.steps)


def test_a_weight_is_rounded_in_the_memory_of_a_few_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control reads all of them."""
    save_file({"a": torch.ones(1000, 72), "rest": torch.ones(20_000, 72)}, tmp_path / WEIGHTS)
    source = TensorSource(Shards(tmp_path), torch.bfloat16, CPU, lambda name: None)  # so rows are converted as well
    weight = source.weight([Part("a", (1000, 72), torch.randperm(1000))])
    asked = list[int]()

    def counting(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        asked.append(prod(shape) * dtype.itemsize)
        return block(shape, dtype)

    monkeypatch.setattr(shards, "block", counting)
    assert isinstance(weight, StoredWeight)
    quantise_weight(weight)
    assert max(asked) == SLICE_ROWS * 72 * 4
    weight.read()
    assert max(asked) == 1000 * 72 * 4


def test_numbers_are_converted_in_the_memory_of_a_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in another order too, and a row that alone is more than is converted at once."""
    tables = {"a": torch.randn(1001, 72, dtype=torch.float64), "b": torch.randn(7, 72, dtype=torch.float64)}
    save_file(tables | {"rest": torch.ones(20_000, 72)}, tmp_path / WEIGHTS)
    source = TensorSource(Shards(tmp_path), torch.float32, CPU, lambda name: None)
    order, asked = torch.randperm(1001), list[int]()

    def counting(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        asked.append(prod(shape) * dtype.itemsize)
        return block(shape, dtype)

    monkeypatch.setattr(shards, "block", counting)
    expected = torch.cat([tables["a"][order], tables["b"]]).float()
    for at_once, converted in ((10, 1), (4000, 6), (2**22, 1001)):
        monkeypatch.setattr(shards, "CONVERTED_BYTES", at_once)
        asked.clear()
        assert torch.equal(source.stack([Part("a", (1001, 72), order), Part("b", (7, 72))]), expected)
        asked.remove(expected.nbytes)
        assert max(asked, default=0) <= converted * 72 * 8


def test_freed_memory_goes_back_while_a_checkpoint_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few times, however many tensors it has: this takes some ms each time."""
    names = [f"tensor {n}" for n in range(300)]
    save_file({name: torch.ones(10, 8) for name in names}, tmp_path / WEIGHTS)
    times = list[None]()
    monkeypatch.setattr(shards, "give_back_freed_memory", lambda: times.append(None))
    stored = Shards(tmp_path)
    for name in names:
        stored.read(name)
    assert TRIMS - 2 <= len(times) <= TRIMS


def test_memory_that_could_not_be_had_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        raise MemoryError(f"{shape} of {dtype}")

    passing = shards._Passing(100)
    passing.take(10)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "block", refused)
        for _ in range(2):
            with pytest.raises(MemoryError, match=r"\[20\] of torch.uint8"):
                passing.take(20)
    assert len(passing.take(20)) == 20


def test_a_weight_of_another_shape_is_refused_before_it_is_read(directory: Path) -> None:
    source = TensorSource(Shards(directory), torch.float32, CPU, lambda name: None)
    with pytest.raises(ConfigError, match=r"a has shape \(2, 3\), config.json says \(2, 4\)"):
        source.weight([Part("a", (2, 4))])
    weight = source.weight([Part("a", (2, 3))])
    os.truncate(directory / "one.safetensors", 8)
    assert isinstance(weight, StoredWeight)
    with pytest.raises(ConfigError, match=r"one\.safetensors became shorter while it was read: a is not complete"):
        weight.passing()


def test_an_index_that_names_a_missing_file(directory: Path) -> None:
    (directory / "two.safetensors").unlink()
    assert "names files that are missing: two.safetensors" in refused(directory)


@pytest.mark.parametrize("elsewhere", ["../one.safetensors", "/etc/one.safetensors", "x/../../one.safetensors"])
def test_an_index_may_not_leave_its_directory(directory: Path, elsewhere: str) -> None:
    save_file({"a": TENSORS["a"]}, directory.parent / "one.safetensors")
    write_index(directory, {"a": elsewhere})
    assert f"names files outside of its directory: {elsewhere}" in refused(directory)


def test_an_index_that_names_the_wrong_file(directory: Path) -> None:
    write_index(directory, {"a": "two.safetensors"})
    assert "two.safetensors holds 'a', and it does not" in refused(directory)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_a_malformed_index(directory: Path, text: str) -> None:
    (directory / INDEX).write_text(text, "utf-8")
    assert "is malformed" in refused(directory)


@pytest.mark.parametrize("name", ["x" * 300 + ".safetensors", "x/" + "é" * 200 + "/a.safetensors"])
def test_an_index_with_a_name_that_no_file_can_have(directory: Path, name: str) -> None:
    write_index(directory, {"a": name})
    assert "names a file by more than 255 bytes" in refused(directory)


def test_two_sets_of_weights(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory with an index and a single file: the index is read if they hold the same tensors."""
    save_file(TENSORS, directory / WEIGHTS)
    shards = Shards(directory)
    assert {t.file.name for t in shards.tensors.values()} == {"one.safetensors", "two.safetensors"}
    assert f"{directory} holds both {WEIGHTS} and {INDEX}: the files of the index are read" in caplog.text
    save_file({**TENSORS, "d": TENSORS["d"].float()}, directory / WEIGHTS)
    assert "they differ in 1 tensors, 'd' among them: remove the one" in refused(directory)
    save_file({**TENSORS, "g": torch.ones(2)}, directory / WEIGHTS)
    assert "they differ in 1 tensors, 'g' among them: remove the one" in refused(directory)
    write_index(directory, dict.fromkeys(TENSORS, WEIGHTS))
    caplog.clear()
    assert Shards(directory).stored("d").file.name == WEIGHTS
    assert not caplog.text


def test_a_pickle_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    message = refused(tmp_path)
    assert "holds no model.safetensors; pytorch_model.bin is a pickle, and a pickle can run code" in message


def test_no_weights_at_all(tmp_path: Path) -> None:
    assert refused(tmp_path).endswith("holds no model.safetensors (other weight formats are not read)")
    assert "holds no model.safetensors" in refused(tmp_path / "nowhere")
