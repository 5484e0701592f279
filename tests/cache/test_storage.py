"""The storage's three views are one memory."""

import torch

from cache.storage import SlottedStorage


def test_rows_written_are_keys_and_values_read() -> None:
    storage = SlottedStorage(
        num_layers=2, num_slots=3, max_len=5, kv_heads=2, head_dim=4, dtype=torch.float64, device=torch.device("cpu")
    )
    slot, positions = 1, torch.tensor([0, 1, 2])
    written = torch.randn(3, 4, 4, dtype=torch.float64)  # [positions, 2 kv heads of keys then of values, head_dim]
    storage.rows[1].index_copy_(0, slot * storage.max_len + positions, written)
    keys, values = storage.read(1, slot, 3)
    assert torch.equal(keys, written[:, :2].transpose(0, 1))
    assert torch.equal(values, written[:, 2:].transpose(0, 1))
    assert storage.rows[0].abs().sum() == 0
    # Unwritten positions are zero: they meet probability 0 in attention, and 0 · NaN would be NaN.
    assert storage.rows[1].abs().sum() == written.abs().sum()


def test_a_cleared_slot_is_zero_and_its_neighbours_are_not() -> None:
    storage = SlottedStorage(
        num_layers=2, num_slots=3, max_len=5, kv_heads=2, head_dim=4, dtype=torch.float64, device=torch.device("cpu")
    )
    for rows in storage.rows:
        rows.fill_(1.0)[5:10] = torch.nan
    storage.clear(1)
    for layer, rows in enumerate(storage.rows):
        assert all(not part.any() for part in storage.read(layer, 1, 5))
        assert rows.sum() == 2 * 5 * 4 * 4  # of the two others


def test_a_window_is_a_view_of_neighbouring_slots() -> None:
    storage = SlottedStorage(
        num_layers=2, num_slots=4, max_len=5, kv_heads=2, head_dim=4, dtype=torch.float64, device=torch.device("cpu")
    )
    for layer, rows in enumerate(storage.rows):
        rows.copy_(torch.arange(rows.numel(), dtype=torch.float64).view(rows.shape) + 1000 * layer)
    keys, values = storage.window(1, 2, 3)
    for layer in range(2):
        assert keys[layer].shape == values[layer].shape == (2, 2, 3, 4)
        for i, slot in enumerate((1, 2)):
            expected_keys, expected_values = storage.read(layer, slot, 3)
            assert torch.equal(keys[layer][i], expected_keys)
            assert torch.equal(values[layer][i], expected_values)
    storage.rows[0].zero_()
    assert keys[0].abs().sum() == 0
