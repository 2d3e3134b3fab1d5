"""The Mamba-2 mixers of transformers' Nemotron-H with the scan of `quatrain.kernels.ssd`.

`use_ssd_scan` changes the class of each mixer of one model, and of nothing else: parameters, state_dict keys,
configuration and checkpoints stay Nemotron-H's.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from quatrain.kernels.ssd import causal_conv_silu, ssd_scan

__all__ = ["SsdMixer", "use_ssd_scan"]

# What makes a sequence continue another, or holds several: the mixer's own forward knows these.
_OWN_FORWARD = ("cache", "cache_params", "past_key_values", "seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")


class SsdMixer(NemotronHMamba2Mixer):
    """A Nemotron-H Mamba-2 mixer that scans whole sequences in matrix products.

    With a cache (generation) or packed sequences it runs its own forward of transformers. `use_ssd_scan` turns
    existing mixers into it; it is never constructed directly.
    """

    scan_chunk: int | None = None  # positions a chunk; None for what suits the device

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[batch, length, hidden] to the same shape; arguments are those of transformers' mixer."""
        if args or self._is_left_to_transformers() or any(kwargs.get(name) is not None for name in _OWN_FORWARD):
            return super().forward(hidden_states, *args, **kwargs)
        mask = kwargs.get("attention_mask")
        projected = self.in_proj(_masked(hidden_states, mask))
        gate, mixed, steps = projected.split([self.intermediate_size, self.conv_dim, self.num_heads], dim=-1)
        wide = torch.float64 if projected.dtype == torch.float64 else torch.float32
        gate = gate.to(wide)  # what the norm would do first; here, before the scan, compilers need not keep it
        operands = _operands(projected)
        mixed = causal_conv_silu(mixed, self.conv1d.weight.squeeze(1), self.conv1d.bias).to(operands or wide)
        scanned = self._scan(_masked(mixed, mask), steps.to(wide), operands)
        return self.out_proj(self.norm(scanned, gate).to(hidden_states.dtype))

    def _is_left_to_transformers(self) -> bool:
        """Whether accelerate brings the convolution's weight in for its own call, or its activation is not SiLU."""
        return getattr(self.conv1d, "_hf_hook", None) is not None or self.activation not in ("silu", "swish")

    def _scan(self, mixed: Tensor, steps: Tensor, operands: torch.dtype | None) -> Tensor:
        """The state-space part: mixed [b, t, x B C], steps [b, t, h] wide, before their bias, to [b, t, h p] wide."""
        states = self.n_groups * self.ssm_state_size
        x, B, C = mixed.split([self.intermediate_size, states, states], dim=-1)
        dt = nn.functional.softplus(steps + self.dt_bias.to(steps.dtype))
        y = ssd_scan(
            x.unflatten(-1, (self.num_heads, self.head_dim)),
            dt.clamp(*self.time_step_limit),
            -torch.exp(self.A_log.to(steps.dtype)),
            B.unflatten(-1, (self.n_groups, -1)),
            C.unflatten(-1, (self.n_groups, -1)),
            self.D,
            chunk=self.scan_chunk,
            operands=operands,
        )
        return y.flatten(2)

    def extra_repr(self) -> str:
        """The scan and its chunk."""
        return f"scan=ssd, chunk={self.scan_chunk or 'by device'}"


def _masked(states: Tensor, mask: Tensor | None) -> Tensor:
    """[b, t, channels] with zeros where the mask [b, t] has them (padding)."""
    return states if mask is None else (states * mask[:, :, None]).to(states.dtype)


def _operands(projected: Tensor) -> torch.dtype | None:
    """bf16 where the projection is bf16 and the device multiplies it faster."""
    return torch.bfloat16 if projected.is_cuda and projected.dtype == torch.bfloat16 else None


def use_ssd_scan(model: nn.Module) -> list[str]:
    """Let the Nemotron-H Mamba-2 mixers of this model scan in matrix products, in place.

    Returns the names of the mixers changed, in order: those that are exactly transformers' class.
    """
    found = {name: m for name, m in model.named_modules() if type(m) is NemotronHMamba2Mixer}
    for mixer in found.values():
        mixer.__class__ = SsdMixer
    return list(found)
