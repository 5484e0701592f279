"""Which form a decoder's layers have for passes of few rows, or on a CPU of any number."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.models.compiled_layers import CompiledLayers
from engine.models.decoder import DecoderConfig, LayersOfFewRows
from engine.models.few_rows import FewRows
from engine.models.layer import Layer


def layers_for_few_rows(
    layers: Seq[Layer], config: DecoderConfig, rotations: Seq[Tensor], dtype: torch.dtype, device: torch.device
) -> LayersOfFewRows | None:
    """None: such passes are computed as any other. rotations: as Decoder has them; dtype: of the states."""
    if device.type == "cpu":
        return CompiledLayers.of(layers, config, rotations, dtype)
    return FewRows.of(layers, config, rotations)
