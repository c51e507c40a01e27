"""Replace the feed-forward layers of a PyTorch transformer by MoE layers, train a few steps, and
print the expert load."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moesaic import MoE, balance_on_step


class Block(nn.TransformerEncoderLayer):
    """A stock encoder layer whose feed-forward block is an MoE layer."""

    def __init__(self, dim: int, num_heads: int, num_experts: int) -> None:
        super().__init__(
            dim, num_heads, dim_feedforward=1, batch_first=True, norm_first=True, dropout=0.0
        )
        self.moe = MoE(dim=dim, hidden=2 * dim, num_experts=num_experts, top_k=2)

    def _ff_block(self, x: Tensor) -> Tensor:
        """Run the MoE layer in place of the dense feed-forward block."""
        return self.moe(x)


def main() -> None:
    """Fit random targets for a few steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64, 4, num_experts=8) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    balance_on_step(optimizer, model)
    x, target = torch.randn(2, 8, 32, 64)
    for step in range(20):
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")
    with torch.no_grad():
        _, routing = model[0].moe(x, return_routing=True)
    print("tokens per expert of the first layer:", routing.counts.tolist())


if __name__ == "__main__":
    main()
