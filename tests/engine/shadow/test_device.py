"""The shadow device itself: what it refuses, what it counts, and that nothing of it stays behind."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from engine.models.decoder import Decoder
from tests.engine.shadow import guard
from tests.engine.shadow.counting import Counts, Kind
from tests.engine.shadow.cuda import MODELS, shadow_cuda
from tests.engine.shadow.device import ShadowDevice, ShadowError, ShadowTensor


@pytest.fixture
def device() -> Iterator[ShadowDevice]:
    with shadow_cuda() as found:
        yield found


def numbers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), device="cuda").view(shape)


def kinds(counts: Counts) -> dict[Kind, int]:
    found: dict[Kind, int] = {}
    for crossing, n in counts.crossings.items():
        found[crossing.kind] = found.get(crossing.kind, 0) + n
    return found


def names(counts: Counts) -> dict[str, int]:
    return {operation.name: n for operation, n in counts.operations.items()}


# --- what it computes and refuses -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("device")
def test_tensors_say_cuda_and_compute() -> None:
    x = numbers(3, 4)
    assert x.is_cuda
    assert x.device == torch.device("cuda", 0) == torch.zeros(1, device="cuda").device
    y = x[1:, ::2].clone().add_(1)
    assert isinstance(y, ShadowTensor)
    assert y.tolist() == [[5, 7], [9, 11]]
    x[0].zero_()
    assert x.cpu().tolist()[0] == [0] * 4
    assert not isinstance(x.cpu(), ShadowTensor)


@pytest.mark.usefixtures("device")
def test_inference_mode_computes_the_same() -> None:
    with torch.inference_mode():
        x = numbers(2, 3).double()
        assert (x @ x.t()).reshape(-1).tolist() == [5.0, 14.0, 14.0, 50.0]


MIXES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda x, cpu: x + cpu,
    "write": lambda x, cpu: cpu.add_(x),
    "cat": lambda x, cpu: torch.cat([x, cpu]),
    "where": lambda x, cpu: torch.where(x > 1, x, cpu),
    "gather": lambda x, cpu: x.gather(0, cpu),
    "index_select": lambda x, cpu: x.index_select(0, cpu),
    "index of a CPU tensor": lambda x, cpu: cpu[x],
    "indexed values": lambda x, cpu: x.index_put_((x,), cpu),
    "matmul": lambda x, cpu: x.double() @ cpu.double(),
    "custom operation": lambda x, cpu: torch.ops.foretoken.shadow_test_add_.default(x, cpu),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.usefixtures("device", "custom")
def test_a_mix_of_devices_is_refused(mix: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        x, cpu = numbers(3), torch.arange(3)
        with pytest.raises(ShadowError, match="CPU tensor"):
            MIXES[mix](x, cpu)


@pytest.mark.usefixtures("device")
def test_numbers_of_the_host_are_taken() -> None:
    x = numbers(3) + torch.tensor(2)
    assert torch.where(x > 3, x, torch.tensor(0)).tolist() == [0, 0, 4]


@pytest.mark.usefixtures("device")
def test_numpy_is_refused() -> None:
    with pytest.raises(ShadowError, match="copy it to the host"):
        numbers(3).numpy()


# --- what it counts -------------------------------------------------------------------------------------------------

CROSSINGS: dict[str, tuple[Callable[[Tensor], object], dict[Kind, int]]] = {
    "tensor of numbers": (lambda x: torch.tensor([1, 2], device="cuda"), {"H2D copy": 1}),
    "new_tensor": (lambda x: x.new_tensor([1, 2]), {"H2D copy": 1}),
    "as_tensor": (lambda x: torch.as_tensor([1, 2], device=x.device), {"H2D copy": 1}),
    "to": (lambda x: torch.ones(2).to(x.device), {"H2D copy": 1}),
    "cuda()": (lambda x: torch.ones(2).cuda(), {"H2D copy": 1}),
    "copy_": (lambda x: x.copy_(torch.ones(3)), {"H2D copy": 1}),
    "list index": (lambda x: x[[0, 1]], {"H2D copy": 1}),
    "write by a list index": (lambda x: x.__setitem__([0, 1], 5), {"H2D copy": 1}),
    "CPU index": (lambda x: x[torch.tensor([0, 1])], {"H2D index": 1}),
    "cpu()": (lambda x: x.cpu(), {"D2H copy": 1}),
    "tolist": (lambda x: x.tolist(), {"D2H copy": 1}),
    "copy_ to the host": (lambda x: torch.zeros(3, dtype=torch.int64).copy_(x), {"D2H copy": 1}),
    "item": (lambda x: x[0].item(), {"D2H sync": 1}),
    "bool": (lambda x: bool(x.all()), {"D2H sync": 1}),
    "int": (lambda x: int(x[1]), {"D2H sync": 1}),
    "nonzero": (lambda x: x.nonzero(), {"D2H sync": 1}),
    "mask": (lambda x: x[x > 1], {"D2H sync": 1}),
    "write by a mask": (lambda x: x.__setitem__(x > 1, x[:1]), {}),
    "unique": (lambda x: x.unique(), {"D2H sync": 1}),
    "equal": (lambda x: torch.equal(x, x + 1), {"D2H sync": 1}),
    "repeat_interleave": (lambda x: x.repeat_interleave(x), {"D2H sync": 1}),
    "repeat_interleave by a number": (lambda x: x.repeat_interleave(2), {}),
    "device index": (lambda x: x[x], {}),
    "full": (lambda x: torch.full_like(x, 7), {}),
    "synchronize": (lambda x: torch.cuda.synchronize(), {"wait": 1}),
    "a stream's synchronize": (lambda x: torch.cuda.current_stream().synchronize(), {"wait": 1}),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", CROSSINGS)
def test_crossings_are_counted(device: ShadowDevice, name: str, inference: bool) -> None:
    work, expected = CROSSINGS[name]
    with torch.inference_mode(inference):
        x = numbers(3)
        before = device.counts.copy()
        work(x)
        counts = device.counts.since(before)
    assert kinds(counts) == expected
    assert counts.stalls == sum(expected.values()) == counts.uploads + counts.downloads + kinds(counts).get("wait", 0)
    assert all(c.where.startswith("tests/engine/shadow/test_device.py:") for c in counts.crossings)


OPERATIONS: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "view": (lambda x: x.view(1, -1)[0].t().unsqueeze(0).expand(2, 3), 0),
    "empty": (lambda x: (torch.empty(3, device="cuda"), x.new_empty(2), torch.empty_like(x)), 0),
    "sum of products": (lambda x: (x * x + x).sum(), 3),
    "in place": (lambda x: x.add_(1).clamp_(max=2), 2),
    "type": (lambda x: x.double(), 1),
    "zeros": (lambda x: torch.zeros(3, device="cuda"), 1),
    "copy on the device": (lambda x: x[:1].copy_(x[1:2]), 1),
    "upload": (lambda x: torch.ones(2).to(x.device), 0),
    "download": (lambda x: (x.cpu(), x.tolist(), x[0].item()), 0),
    "on the host": (lambda x: torch.ones(3) + 1, 0),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_counted(device: ShadowDevice, name: str, inference: bool) -> None:
    work, expected = OPERATIONS[name]
    with torch.inference_mode(inference):
        x = numbers(3)
        before = device.counts.copy()
        work(x)
    counts = device.counts.since(before)
    assert (counts.outside, counts.inside) == (expected, 0), names(counts)


def test_attention_is_one_operation(device: ShadowDevice) -> None:
    with torch.inference_mode():
        q = torch.ones(1, 2, 3, 4, device="cuda", dtype=torch.float64)
        before = device.counts.copy()
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert names(device.counts.since(before)) == {"aten.scaled_dot_product_attention.default": 1}


def test_operations_of_models_are_counted_apart(device: ShadowDevice) -> None:
    before = device.counts.copy()
    with device.counts.in_model():
        numbers(3).add_(1)
    numbers(3)
    counts = device.counts.since(before)
    assert (counts.inside, counts.outside) == (2, 1)


def test_the_threads_of_a_pool_reach_the_device(device: ShadowDevice) -> None:
    before = device.counts.copy()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda n: torch.tensor([n], device="cuda") + 1, range(3)))
    assert [x.tolist() for x in found] == [[1], [2], [3]]
    counts = device.counts.since(before)
    assert (counts.uploads, counts.downloads, counts.outside) == (3, 3, 3)


# --- copies without blocking, events, streams -----------------------------------------------------------------------


def pinned(*values: int) -> Tensor:
    return torch.tensor(values).pin_memory()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2, dtype=torch.int64, pin_memory=True).fill_(4),
        lambda: torch.zeros(2, dtype=torch.int64, pin_memory=True).fill_(4),
        lambda: torch.tensor([4, 4], pin_memory=True),
        lambda: torch.tensor([4, 4]).pin_memory(),
    ],
)
def test_an_upload_of_pinned_memory_does_not_block(device: ShadowDevice, make: Callable[[], Tensor]) -> None:
    host = make()
    assert host.is_pinned()
    assert host[1:].is_pinned()
    assert not torch.ones(2).is_pinned()
    before = device.counts.copy()
    x = host.to("cuda", non_blocking=True)
    numbers(2).copy_(host, non_blocking=True)
    counts = device.counts.since(before)
    assert (counts.uploads, counts.stalls) == (2, 0)
    assert x.tolist() == [4, 4]


@pytest.mark.usefixtures("device")
def test_a_pinned_buffer_that_is_written_too_early_is_refused() -> None:
    host = pinned(1, 2)
    x = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    host.fill_(3)  # the upload has ended
    assert x.tolist() == [1, 2]
    host.to("cuda", non_blocking=True)
    host.fill_(4)
    with pytest.raises(ShadowError, match="before its upload had ended"):
        torch.cuda.synchronize()


def test_a_download_without_blocking_arrives_when_it_was_waited_for(device: ShadowDevice) -> None:
    host, event = pinned(0, 0), torch.cuda.Event()
    before = device.counts.copy()
    host.copy_(numbers(2) + 5, non_blocking=True)
    event.record()
    counts = device.counts.since(before)
    assert (counts.downloads, counts.stalls) == (1, 0)
    assert host.tolist() == [0, 0]
    event.synchronize()
    assert host.tolist() == [5, 6]
    assert device.counts.since(before).stalls == 1


@pytest.mark.usefixtures("device")
def test_a_new_host_tensor_without_blocking_arrives_later_too() -> None:
    host = (numbers(2) + 5).to("cpu", non_blocking=True)
    assert host.tolist() == [0, 0]
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [5, 6]


@pytest.mark.usefixtures("device")
def test_a_download_to_memory_that_is_not_pinned_blocks() -> None:
    host = torch.zeros(2, dtype=torch.int64)
    host.copy_(numbers(2) + 5, non_blocking=True)
    assert host.tolist() == [5, 6]


@pytest.mark.usefixtures("device")
def test_an_event_tells_its_time_once_the_host_has_waited() -> None:
    first, last, later = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    with pytest.raises(RuntimeError, match="must be recorded"):
        first.elapsed_time(last)
    first.record()
    torch.cuda.current_stream().record_event(last)
    assert not last.query()
    with pytest.raises(RuntimeError, match="wait for it first"):
        first.elapsed_time(last)
    numbers(2).tolist()
    later.record()
    assert first.elapsed_time(last) >= 0
    assert (last.query(), later.query()) == (True, False)
    with pytest.raises(RuntimeError, match="enable_timing"):
        first.elapsed_time(torch.cuda.Event())


# --- operations of the project --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def custom() -> Iterator[None]:
    """foretoken::shadow_test_add_, which writes into its first argument and returns another tensor."""

    @torch.library.custom_op("foretoken::shadow_test_add_", mutates_args=("x",), device_types="cuda")
    def add_(x: Tensor, y: Tensor) -> Tensor:
        raise AssertionError("the shadow has no GPU for this implementation")

    @add_.register_kernel("cpu")
    def _(x: Tensor, y: Tensor) -> Tensor:
        x += y
        return x * 2

    yield
    add_._lib._destroy()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.usefixtures("custom")
def test_an_operation_of_the_project_is_one_operation(device: ShadowDevice, inference: bool) -> None:
    with torch.inference_mode(inference):
        x = numbers(4)
        before = device.counts.copy()
        doubled = torch.ops.foretoken.shadow_test_add_.default(x[1:], x[:3].clone())
    assert names(device.counts.since(before)) == {"aten.clone.default": 1, "foretoken.shadow_test_add_.default": 1}
    assert isinstance(doubled, ShadowTensor)
    assert (x.tolist(), doubled.tolist()) == ([0, 1, 3, 5], [2, 6, 10])


# --- the guard, and what stays behind -------------------------------------------------------------------------------


def test_the_guard_fits_this_version_of_torch() -> None:
    with guard.cuda_guard():
        assert guard._registry()[guard.CUDA]
    assert not guard._registry()[guard.CUDA]


@pytest.mark.parametrize("order", [(1, 2, 0), (3, 4, 5), (0, 1, 3), (6, 7, 8)])
def test_another_order_of_virtual_methods_is_told(order: tuple[int, int, int]) -> None:
    """As a torch with another order would be: this process must neither crash nor keep the guard."""
    told = f"torch {torch.__version__.split('+')[0]}.*adapt ORDER"
    with pytest.raises(guard.GuardError, match=told), guard.cuda_guard(order):
        pass
    assert not guard._registry()[guard.CUDA]


def test_nothing_stays_behind() -> None:
    def state() -> list[object]:
        methods = [getattr(model, method) for model, names in MODELS for method in names]
        cuda = [getattr(torch.cuda, name) for name in sorted(vars(torch.cuda)) if not name.startswith("__")]
        return [torch.tensor, torch.as_tensor, Tensor.pin_memory, Tensor.is_pinned, *methods, *cuda]

    before, available, event = state(), torch.cuda.is_available(), torch.cuda.Event
    with shadow_cuda():
        kept = numbers(3)
        assert torch.cuda.Event is not event
        assert torch.cuda.is_available()
        assert Decoder.forward is not before[4]
    assert state() == before
    assert torch.cuda.is_available() == available
    assert not torch._C._only_lift_cpu_tensors()
    assert not guard._registry()[guard.CUDA]
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    with pytest.raises(ShadowError, match="after its device has gone"):
        kept + 1
    assert (torch.arange(3)[[0, 2]] + 1).numpy().tolist() == [1, 3]


def test_what_a_failing_body_leaves_is_put_back_too() -> None:
    with pytest.raises(ShadowError), shadow_cuda():
        numbers(3).numpy()
    assert not torch.cuda.is_available()
    assert not guard._registry()[guard.CUDA]
