"""A Hugging Face training script in which one line was changed: the optimizer's.

    python examples/huggingface.py

The model is a tiny Llama made from its config, the text this file's bytes; nothing is downloaded. With the Trainer it
is the same line: `Trainer(model, args, train_dataset=data, optimizers=(optimizer, None))`.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

import quatrain as qt

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
text = torch.tensor(list(Path(__file__).read_bytes()), device=device)

config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
model = LlamaForCausalLM(config).to(device)
model.train()

# optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
optimizer = qt.optim.AdamW(model.named_parameters(), lr=5e-3, weight_decay=0.01)

scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=20)
for step in range(20):
    start = torch.randint(len(text) - 64, (8,), device=device)
    batch = text[start[:, None] + torch.arange(64, device=device)]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step in (0, 19):
        print(f"loss at step {step}: {loss.item():.3f}")

print(optimizer.routing().summary())
print(f"optimizer state: {optimizer.bytes_per_parameter():.2f} bytes a parameter (torch.optim.AdamW: 8)")
