"""Estimates the memory of the weights from the headers of their files, before loading."""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from math import ceil, prod

import torch

from engine.config import ConfigError, EngineConfig, WeightForm
from engine.memory.budget import device_memory
from engine.memory.machine import DeviceMemory
from engine.models.loader import Checkpoint
from engine.models.products import keeps_codes
from engine.models.quantize import GROUP
from engine.models.quantized_checkpoints import Quantisation, quantisation
from engine.models.shards import Shards
from engine.profiling.machine_cpus import smaller_weights

# Per number of a product; int4 has a step and an offset per group.
BYTES_OF_FORM = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / GROUP}
BYTES_OF_CODES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}  # as a checkpoint stores them, without steps


def planned_weights(
    config: EngineConfig, checkpoints: Seq[Checkpoint], dtype: torch.dtype, device: torch.device
) -> list[int]:
    """Bytes of each model's weights in memory, about. The copies of small products are not counted. Weights that a
    float32 model keeps in 16 bits are counted as wide: only a measurement tells which these are."""
    planned = []
    for checkpoint, form in zip(checkpoints, weight_forms(config), strict=True):
        tensors, shape = Shards(checkpoint.path).tensors, checkpoint.shape
        product_bytes = BYTES_OF_FORM.get(form, dtype.itemsize)
        if quantised := quantisation(checkpoint.path, checkpoint.raw.get("quantization_config")):
            head_bytes = product_bytes if _has_head(shape.tied, form, device) else 0
            tables = shape.vocab_size * shape.hidden_size * (dtype.itemsize + head_bytes)
            stored_as = {tensor.dtype for tensor in tensors.values()}
            code_bytes = _kept_bytes(quantised, stored_as, form, device) or product_bytes
            planned.append(ceil(tables + shape.layer_numbers * code_bytes))
            continue
        if not checkpoint.native:
            planned.append(sum(prod(tensor.shape) for tensor in tensors.values()) * dtype.itemsize)
            continue
        copied = shape.tied and _has_head(shape.tied, form, device)
        size = shape.vocab_size * shape.hidden_size * product_bytes if copied else 0
        for name, tensor in tensors.items():
            product = len(tensor.shape) > 1 and not name.endswith("embed_tokens.weight")
            size += prod(tensor.shape) * (product_bytes if product else dtype.itemsize)
        planned.append(ceil(size))
    return planned


def _has_head(tied: bool, form: WeightForm, device: torch.device) -> bool:
    """Whether the head's weight is kept beside the embedding. On a CPU its product is packed."""
    return not tied or device.type == "cpu" or form != "as_is"


def _kept_bytes(
    quantised: Quantisation, stored_as: Collection[str], form: WeightForm, device: torch.device
) -> float | None:
    """Bytes of a stored code that a product uses as it is; None: it is dequantised. stored_as: the files' dtypes."""
    if not keeps_codes(quantised, form, device) or (device.type != "cpu" and "F8_E5M2" in stored_as):
        return None
    return BYTES_OF_CODES.get(quantised.kind or "")


def beside_weights(device: torch.device, weights: Seq[int]) -> DeviceMemory:
    """The memory that is left beside weights that are not loaded yet. Raises ConfigError if they do not fit."""
    memory = device_memory(device)
    if sum(weights) > memory.available:
        parts = " and ".join(
            f"{role} {n / 2**20:,.1f} MiB" for role, n in zip(roles(len(weights)), weights, strict=True)
        )
        raise ConfigError(
            f"the weights do not fit on {device}: {parts}, and {memory.available / 2**20:,.1f} MiB are available: "
            f"choose smaller models, {smaller_weights(None if device.type == 'cpu' else frozenset())}"
        )
    return memory._replace(available=memory.available - sum(weights))


def roles(count: int) -> list[str]:
    """The roles of so many models."""
    return ["target", "draft"] if count == 2 else ["target", *(f"draft {n + 1}" for n in range(count - 1))]


def weight_forms(config: EngineConfig) -> list[WeightForm]:
    return [config.target_weights, *(config.draft_weights for _ in config.draft_models)]
