"""A small character-level GPT in plain torch: about 0.9 million parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention

CONTEXT = 48
WIDTH = 136
HEADS = 4
LAYERS = 4
_STD = 0.06


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, normalised before each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.forward_norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(self._attend(self.attention_norm(x)))
        hidden = F.gelu(self.widen(self.forward_norm(x)))
        out: Tensor = x + self.narrow(hidden)
        return out

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return heads.transpose(1, 2).reshape(batch, length, width)


class CharacterGPT(nn.Module):
    """Predicts the next symbol; takes (batch, length) ids with length <= CONTEXT."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, symbols)
        self._initialise()

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        x = self.symbol(ids) + self.position(places)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def _initialise(self) -> None:
        """Layers that add to the residual stream start smaller, as in GPT-2."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                adds = "attention_out" in name or "narrow" in name
                std = _STD / (2 * LAYERS) ** 0.5 if adds else _STD
                nn.init.normal_(parameter, std=std)
