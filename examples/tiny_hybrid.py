"""A tiny hybrid model of transformers, Qwen3.5's architecture: what its examples share."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

KEYS, VALUES, PAIRS, BATCH = 4, 8, 20, 32
PAD = KEYS + VALUES  # a token of its own
SIZES = {
    "vocab_size": PAD + 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "initializer_range": 0.1,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
}


def model() -> nn.Module:
    """Two gated delta net layers and one of attention, the same weights every time."""
    torch.manual_seed(0)
    made: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **SIZES))
    return made


def sequences(count: int, seed: int = 1) -> Iterator[Tensor]:
    """[BATCH, 2 * PAIRS] tokens: key, value, key, value, ...; each sequence has a table of its own."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        table = torch.randint(VALUES, (BATCH, KEYS), generator=generator) + KEYS
        keys = torch.randint(KEYS, (BATCH, PAIRS), generator=generator)
        yield torch.stack([keys, table.gather(1, keys)], 2).flatten(1)
