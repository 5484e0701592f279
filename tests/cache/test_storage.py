"""The storage's three views are one memory."""

import torch

from cache.storage import SlottedStorage


def test_rows_written_are_keys_and_values_read() -> None:
    storage = SlottedStorage(
        num_layers=2, num_slots=3, max_len=5, kv_heads=2, head_dim=4, dtype=torch.float64, device=torch.device("cpu")
    )
    slot, positions = 1, torch.tensor([0, 1, 2])
    written = torch.randn(3, 4, 4, dtype=torch.float64)  # [positions, 2 kv heads of keys then of values, head_dim]
    storage.layers[1].rows.index_copy_(0, slot * storage.max_len + positions, written)
    keys, values = storage.read(1, slot, 3)
    assert torch.equal(keys, written[:, :2].transpose(0, 1))
    assert torch.equal(values, written[:, 2:].transpose(0, 1))
    assert storage.layers[0].rows.abs().sum() == 0
    other = [s for s in range(3) if s != slot]
    assert storage.layers[1].keys[other].abs().sum() == 0
    assert torch.isfinite(storage.layers[1].values).all()  # unwritten positions meet probability 0, and 0 · NaN is NaN
