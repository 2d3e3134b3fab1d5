"""On a GPU: the same bits as on the CPU, and a linear that trains. Skipped where there is none."""

import dataclasses

import pytest
import torch
from torch import nn

import quatrain as qt
from quatrain.kernels.quantize import supported_specs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("transform", [None, qt.Hadamard(16), qt.Hadamard(128)])
def test_codes_and_scales_are_those_of_the_cpu(transform: qt.Hadamard | None) -> None:
    inputs = [
        torch.randn(33, 77).bfloat16(),
        torch.randn(48, 256) * torch.logspace(-9, 2, 48)[:, None],
        torch.zeros(4, 32),
    ]
    for x in inputs:
        for spec in supported_specs():
            try:
                full = dataclasses.replace(spec, transform=transform)
            except ValueError:
                continue
            a, b = (qt.quantize(x.to(device), full, seed=3, offset=5) for device in ("cpu", "cuda"))
            for part in ("codes", "scales", "amax"):
                left, right = getattr(a, part), getattr(b, part).cpu()
                assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), (full, part)
            assert torch.equal(a.dequantize(), b.dequantize().cpu()), full


def test_linear_follows_the_cpu() -> None:
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 96))
        x = torch.randn(64, 256)
        qt.apply(model, qt.load_recipe("nvfp4").to_toml().replace("last_share = 0.15", "last_share = 0.0"))
        model.to(device)
        model(x.to(device)).square().sum().backward()
        results.append([p.grad.cpu() for p in model.parameters()])
        assert qt.rng_state(model).tolist() == [1]
    for a, b in zip(*results, strict=True):  # accumulation order may flip a rare code between the two
        assert (a - b).norm() < 2e-2 * a.norm()


def test_autocast_and_compile_on_the_gpu() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128)).cuda()
    qt.apply(model, "nvfp4-plain")
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(128, 256, device="cuda")
    outputs = []
    for m in (model, compiled):
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = m(x)
        y.float().square().sum().backward()
        outputs.append((y, model[0].weight.grad.clone()))
    assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])
    assert outputs[0][1].dtype == torch.float32
