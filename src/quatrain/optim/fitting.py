"""Fitting Newton-Schulz coefficients to the arithmetic that will run them.

Loss: mean of |NS(M) - polar(M)|_F^2 / m over matrices of three kinds: Gaussian (Marchenko-Pastur spectrum), power-law
(sigma_i ~ 1 / i), and of recorded spectra where given; NS runs with the operands and the split asked for, so noise
counts. It is minimised by the cross-entropy method with a fixed seed, and candidates that fail `check_range` count as
infinitely bad. With BF16 operands rounding is negligible: the loss is then that of the singular values alone.

Optima of the exact loss have a large a, which FP4 cannot bear: hence one fit for each arithmetic.
Source: the loss and the check are this library's own; coefficients fitted to FP4 are proposed by Ding et al. 2026.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quatrain.formats import QuantSpec
from quatrain.kernels.newton_schulz import Iteration, Triple, newton_schulz, starting_point
from quatrain.optim.coefficients import INFLATION, LARGEST, Entry, Range, check_range, steps_of

_ELITE = 0.2
_KEEP = 0.3  # of the previous mean and spread in the next
_CENTRE = {"nvfp4": (2.6, -2.35, 0.75), "bf16": (3.1, -3.6, 1.45)}
_SPREAD = (0.35, 0.5, 0.3)
_DAMPED = (2.1, -1.5, 0.45)  # where the last two steps of a schedule begin
_DIGITS = 4
_CHECKED = 3  # times the steps, for the range check
_DRAWS = 400  # populations drawn at most to fill one with candidates that pass


@dataclass(frozen=True)
class Fit:
    """One fit.

    Args:
        rows: m.
        ratio: n / m.
        operands: "nvfp4" or "bf16".
        split: None or "diagonal".
        steps: of the iteration.
        schedule: one triple for each step in place of one for all.
        population: candidates of a round.
        rounds: of the cross-entropy method.
        matrices: of each kind.
        seed: of matrices and candidates.
        device: where the loss is computed; the drawn numbers are the CPU's everywhere.

    Raises:
        ValueError: a number out of range, or an unknown name.
    """

    rows: int = 128
    ratio: float = 1.0
    operands: str = "nvfp4"
    split: str | None = None
    steps: int = 5
    schedule: bool = False
    population: int = 40
    rounds: int = 16
    matrices: int = 2
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.operands not in _CENTRE or self.split not in (None, "diagonal"):
            raise ValueError(
                f'operands is "nvfp4" or "bf16" and split None or "diagonal", received {self.operands!r} and '
                f"{self.split!r}"
            )
        lowest = {"rows": 16, "ratio": 1, "steps": 1, "population": 10, "rounds": 1, "matrices": 1}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is at least {least}, received {getattr(self, name)}; raise it")

    @property
    def columns(self) -> int:
        """The matrices' n."""
        return round(self.rows * self.ratio)

    @property
    def evaluations(self) -> int:
        """Candidates in all."""
        return self.population * self.rounds


@dataclass(frozen=True)
class Fitted:
    """What a fit found: the entry for a table, its loss on fresh matrices, and the range check it passes."""

    entry: Entry
    loss: float
    range: Range


Progress = Callable[[int, float], None]  # evaluations done, best loss so far


def fit(task: Fit, spectra: Sequence[Tensor] = (), progress: Progress | None = None) -> Fitted:
    """Run one fit.

    Args:
        task: what to fit.
        spectra: singular values of recorded momenta, 1-D each, of any lengths and scales.
        progress: called after each candidate.

    Raises:
        ValueError: no candidate passed the range check.
    """
    draw = torch.Generator().manual_seed(task.seed)
    loss_of = _loss(task, spectra, draw)
    mean, spread = _start(task)
    best, best_loss = mean, math.inf
    for number in range(task.rounds):
        candidates = _feasible(task, mean, spread, draw)
        losses = []
        for index, candidate in enumerate(candidates):
            losses.append(loss_of(_schedule(task, candidate)))
            if losses[-1] < best_loss:
                best, best_loss = candidate, losses[-1]
            if progress is not None:
                progress(number * task.population + index + 1, best_loss)
        order = torch.tensor(losses).argsort()[: max(2, round(_ELITE * task.population))]
        elite = candidates[order]
        mean = _KEEP * mean + (1 - _KEEP) * elite.mean(dim=0)
        spread = _KEEP * spread + (1 - _KEEP) * elite.std(dim=0)
    return _verdict(task, [best, mean.round(decimals=_DIGITS)], _loss(task, spectra, draw))


def _verdict(task: Fit, finalists: list[Tensor], loss_of: Callable[[tuple[Triple, ...]], float]) -> Fitted:
    """The better of the finalists that pass the check, on matrices that the search has not seen."""
    passed = [f for f in finalists if _passes(task, f)]
    losses = [loss_of(_schedule(task, f)) for f in passed]
    if not losses or not math.isfinite(min(losses)):
        raise ValueError(
            "no candidate kept [0, 1] in range under 8 % of inflation and a finite loss; raise population or rounds"
        )
    winner = passed[losses.index(min(losses))]
    schedule = _schedule(task, winner)
    entry = Entry(
        task.rows,
        float(task.ratio),
        task.operands,
        task.split or "none",
        schedule if task.schedule else schedule[:1],
    )
    return Fitted(entry, min(losses), check_range(schedule))


def _start(task: Fit) -> tuple[Tensor, Tensor]:
    centre = torch.tensor([_CENTRE[task.operands]] * (task.steps if task.schedule else 1), dtype=torch.float64)
    if task.schedule and task.steps > 2:
        centre[-2:] = torch.tensor(_DAMPED, dtype=torch.float64)
    return centre, torch.tensor(_SPREAD, dtype=torch.float64).expand_as(centre).clone()


def _feasible(task: Fit, mean: Tensor, spread: Tensor, draw: torch.Generator) -> Tensor:
    """A population [p, steps or 1, 3] of candidates that pass the range check; the mean is one if it does."""
    found = [mean.round(decimals=_DIGITS)]
    found = found if _passes(task, found[0]) else []
    for _ in range(_DRAWS):
        noise = torch.randn(task.population, *mean.shape, generator=draw, dtype=torch.float64)
        candidates = (mean + spread * noise).round(decimals=_DIGITS)
        for candidate in candidates[_on_coarse_grid(task, candidates)]:
            if _passes(task, candidate):
                found.append(candidate)
            if len(found) == task.population:
                return torch.stack(found)
    raise ValueError(
        f"only {len(found)} of {_DRAWS * task.population} candidates pass the range check; take a smaller population"
    )


def _on_coarse_grid(task: Fit, candidates: Tensor) -> Tensor:
    """Whether candidates [p, steps or 1, 3] pass on 512 points: most that fail the check fail here, at once."""
    x = torch.linspace(0.0, 1.0, 512, dtype=torch.float64)
    passes = torch.ones(len(candidates), dtype=torch.bool)
    for step in range(_CHECKED * task.steps):
        a, b, c = candidates[:, min(step, candidates.shape[1] - 1), :, None].unbind(1)
        x = INFLATION * x
        x = x * (a + b * x.square() + c * x.square().square())
        passes &= (x.amin(1) >= -1e-12) & (x.amax(1) <= LARGEST)
    return passes


def _passes(task: Fit, candidate: Tensor) -> bool:
    """The range check, over more steps than asked for: an unstable fixed point shows late."""
    return check_range(steps_of(_schedule(task, candidate), _CHECKED * task.steps)).passes


def _schedule(task: Fit, candidate: Tensor) -> tuple[Triple, ...]:
    return steps_of([(a, b, c) for a, b, c in candidate.tolist()], task.steps)


def _loss(task: Fit, spectra: Sequence[Tensor], draw: torch.Generator) -> Callable[[tuple[Triple, ...]], float]:
    """The loss of a schedule on newly drawn matrices."""
    if task.operands == "bf16":
        return _exact_loss(task, spectra)
    start, polar = _matrices(task, spectra, draw)
    operands = QuantSpec("nvfp4", scale="four-over-six")

    def loss_of(schedule: tuple[Triple, ...]) -> float:
        found = newton_schulz(start, Iteration(schedule, operands, task.split)).float()
        return _finite(float((found - polar).square().sum(dim=(1, 2)).mean()) / task.rows)

    return loss_of


def _exact_loss(task: Fit, spectra: Sequence[Tensor]) -> Callable[[tuple[Triple, ...]], float]:
    values = torch.stack(_unit(_spectra(task, spectra)))

    def loss_of(schedule: tuple[Triple, ...]) -> float:
        x = values
        for a, b, c in schedule:
            square = x * x
            x = x * (a + square * (b + square * c))
        return _finite(float((x - 1).square().mean()))

    return loss_of


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _unit(spectra: list[Tensor]) -> list[Tensor]:
    return [s / s.norm() for s in spectra]


def _spectra(task: Fit, recorded: Sequence[Tensor]) -> list[Tensor]:
    """Singular values, float64 [m] each: `matrices` of each kind (recorded ones all), in any scale."""
    kinds = [marchenko_pastur(task.rows, task.ratio), 1.0 / torch.arange(1, task.rows + 1, dtype=torch.float64)]
    return [values for values in kinds for _ in range(task.matrices)] + [_resampled(s, task.rows) for s in recorded]


def marchenko_pastur(rows: int, ratio: float) -> Tensor:
    """Quantiles (i + 1/2) / m of the singular values of a Gaussian m x n matrix, n = ratio m, at unit Frobenius norm.

    sigma sqrt(m) has the density sqrt((hi^2 - s^2) (s^2 - lo^2)) / (pi y s) on lo, hi = 1 -+ sqrt(y), y = 1 / ratio.
    """
    y = 1.0 / ratio
    lo, hi = 1.0 - math.sqrt(y), 1.0 + math.sqrt(y)
    edges = torch.linspace(lo, hi, 20_001, dtype=torch.float64)
    s = (edges[1:] + edges[:-1]) / 2
    mass = (((hi * hi - s * s) * (s * s - lo * lo)).clamp(min=0).sqrt() / s).cumsum(0)
    wanted = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows * mass[-1]
    return s[torch.searchsorted(mass, wanted).clamp(max=len(s) - 1)].flip(0) / math.sqrt(rows)


def _matrices(task: Fit, recorded: Sequence[Tensor], draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """First X [k, m, n] in BF16 and polar factors in fp32, of matrices with random singular vectors."""
    matrices, polar = [], []
    for values in _spectra(task, recorded):
        u, _, v = torch.linalg.svd(_normal(task.rows, task.columns, draw), full_matrices=False)
        matrices.append((u * values) @ v)
        polar.append(u @ v)
    start = starting_point(torch.stack(matrices).float(), None)
    return start.to(task.device), torch.stack(polar).float().to(task.device)


def _normal(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=draw, dtype=torch.float64)


def _resampled(values: Tensor, length: int) -> Tensor:
    """A spectrum of any length as one of `length` values, between neighbours linearly in the index."""
    ordered = values.double().flatten().sort(descending=True).values
    return torch.nn.functional.interpolate(ordered[None, None], size=length, mode="linear", align_corners=True)[0, 0]


def load_spectra(path: str | Path) -> list[Tensor]:
    """Spectra from a safetensors file: 1-D tensors are singular values, others matrices (trailing dimensions flatten).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no safetensors file, no tensor in it, or one without a positive finite singular value.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no spectra at {path}; give a safetensors file of singular values or of matrices")
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); write it again") from error
    if not tensors:
        raise ValueError(f"{path} holds no tensor; record singular values or matrices in it")
    spectra = []
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} of {path} must hold finite singular values or matrices, received {tensor.dtype}")
        values = tensor.double() if tensor.dim() == 1 else torch.linalg.svdvals(tensor.double().flatten(1))
        if not values.numel() or float(values.min()) < 0 or float(values.max()) == 0:
            raise ValueError(f"{name} of {path} must have singular values of at least 0, one of them positive")
        spectra.append(values)
    return spectra
