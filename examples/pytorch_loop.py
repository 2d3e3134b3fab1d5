"""A plain PyTorch training loop in which one line was changed: the optimizer's.

    python examples/pytorch_loop.py

A small byte-level model learns this file. CPU or GPU, a few seconds, nothing is downloaded.
"""

from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

import quatrain as qt

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
text = torch.tensor(list(Path(__file__).read_bytes()), device=device)

layers = {"embedding": nn.Embedding(256, 64), "flatten": nn.Flatten(), "up": nn.Linear(8 * 64, 256), "relu": nn.ReLU()}
model = nn.Sequential(OrderedDict(layers, head=nn.Linear(256, 256, bias=False))).to(device)

# optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = qt.optim.AdamW(model.named_parameters(), lr=3e-3)

scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
for step in range(30):
    start = torch.randint(len(text) - 9, (64,), device=device)
    window = text[start[:, None] + torch.arange(9, device=device)]
    loss = nn.functional.cross_entropy(model(window[:, :8]), window[:, 8])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if step in (0, 29):
        print(f"loss at step {step}: {loss.item():.3f}")

print(optimizer.routing())
print(f"optimizer state: {optimizer.bytes_per_parameter():.2f} bytes a parameter (torch.optim.AdamW: 8)")
