"""Settings that every test needs: one torch thread, no network, no usage reports."""

import os

# Before any import of ray, transformers or tokenizers: they read these once.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
